"""SQuAD's measures on cases worked out by the rules of the official scripts."""

import pytest

from bertjax.metrics import squad as metrics


@pytest.mark.parametrize(
    "text, normal",
    [
        ("The  Cat, sat!", "cat sat"),
        ("an\tapple\u00a0a day", "apple day"),
        ("theatre", "theatre"),
        ("\u2013 \u00c9tat", "\u2013 \u00e9tat"),  # an en dash is no ASCII punctuation
        ("U.S.A.", "usa"),
        ("a the", ""),
        ("", ""),
    ],
)
def test_normalisation(text, normal):
    assert metrics.normalized(text) == normal


def test_f1_counts_words_as_often_as_both_have_them():
    assert metrics.f1_v1("to be or not to be", "to be to") == pytest.approx(2 * (3 / 6) * 1 / (3 / 6 + 1))
    assert metrics.f1_v1("cat", "dog") == 0.0


def test_both_versions_differ_on_what_normalises_to_nothing():
    assert (metrics.f1_v1("", ""), metrics.f1_v2("", "")) == (0.0, 1.0)
    assert (metrics.f1_v1("the", "a"), metrics.f1_v2("the", "a")) == (0.0, 1.0)
    assert metrics.f1_v2("", "cat") == 0.0


def test_the_best_of_several_answers_counts_and_a_missing_prediction_is_wrong_in_1_1():
    answers = {"1": ("cat", "black cat"), "2": ("dog",)}
    assert metrics.score_v1(answers, {"1": "the black cat"}) == {"exact_match": 50.0, "f1": 50.0}


def test_2_0_leaves_out_what_has_no_prediction_and_splits_by_answer():
    answers = {"1": ("cat",), "2": (), "3": (), "4": ("the",)}
    scores = metrics.score_v2(answers, {"1": "cat", "2": "", "3": "dog"})
    assert scores["exact_match"] == pytest.approx(100 * 2 / 3)
    assert (scores["has_answer_f1"], scores["no_answer_f1"]) == (100.0, 50.0)
    # An answer that normalises to nothing is as good as none.
    assert metrics.score_v2({"4": ("the",)}, {"4": ""})["exact_match"] == 100.0


def test_the_threshold_is_where_most_is_right():
    answers = {"a": ("x",), "b": ("y",), "c": (), "d": ()}
    predictions = {"a": "x", "b": "y", "c": "z", "d": "w"}
    odds = {"a": -3.0, "b": 0.5, "c": 0.0, "d": 2.0}
    scores = metrics.scores_v2(answers, predictions)[1]
    threshold, best = metrics.best_threshold(answers, scores, predictions, odds)

    def score(t: float) -> float:
        return metrics.score_v2(answers, {q: "" if odds[q] > t else predictions[q] for q in answers})["f1"]

    assert score(threshold) == best == max(score(t) for t in (-9, -3, 0, 0.5, 2, 9)) == 75.0


@pytest.mark.parametrize("odds", [(-1.0, -2.0, -3.0), (0.0, 0.0, 0.0), (1.0, 2.0, 3.0)])
def test_the_threshold_reaches_its_score_where_no_answer_is_best_to_all(odds):
    answers = {"a": ("x",), "b": (), "c": ()}
    predictions = {"a": "w", "b": "z", "c": "w"}
    null_odds = dict(zip(answers, odds, strict=True))
    scores = metrics.scores_v2(answers, predictions)[1]
    threshold, best = metrics.best_threshold(answers, scores, predictions, null_odds)
    given = {question: "" if null_odds[question] > threshold else predictions[question] for question in answers}
    assert metrics.score_v2(answers, given)["f1"] == best == pytest.approx(200 / 3)
