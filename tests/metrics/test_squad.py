"""Tests of SQuAD's metrics; the expected scores follow the rules of the official scripts."""

import pytest

from bertjax.metrics import squad as metrics


@pytest.mark.parametrize(
    "text, normalized",
    [
        ("The  Cat, sat!", "cat sat"),
        ("an\tapple\u00a0a day", "apple day"),
        ("theatre", "theatre"),
        ("\u2013 \u00c9tat", "\u2013 \u00e9tat"),  # an en dash is not ASCII punctuation
        ("U.S.A.", "usa"),
        ("a the", ""),
        ("", ""),
    ],
)
def test_normalize_answer_lowercases_and_removes_articles_and_punctuation(text, normalized):
    assert metrics.normalize_answer(text) == normalized


def test_f1_counts_repeated_words():
    assert metrics.f1_v1("to be or not to be", "to be to") == pytest.approx(2 * (3 / 6) * 1 / (3 / 6 + 1))
    assert metrics.f1_v1("cat", "dog") == 0.0


def test_f1_of_two_empty_normalized_answers_is_zero_in_v1_and_one_in_v2():
    assert (metrics.f1_v1("", ""), metrics.f1_v2("", "")) == (0.0, 1.0)
    assert (metrics.f1_v1("the", "a"), metrics.f1_v2("the", "a")) == (0.0, 1.0)
    assert metrics.f1_v2("", "cat") == 0.0


def test_v1_takes_the_best_reference_and_scores_missing_predictions_zero():
    answers = {"1": ("cat", "black cat"), "2": ("dog",)}
    assert metrics.score_v1(answers, {"1": "the black cat"}) == {"exact_match": 50.0, "f1": 50.0}


def test_v2_leaves_out_missing_predictions_and_groups_by_answerability():
    answers = {"1": ("cat",), "2": (), "3": (), "4": ("the",)}
    scores = metrics.score_v2(answers, {"1": "cat", "2": "", "3": "dog"})
    assert scores["exact_match"] == pytest.approx(100 * 2 / 3)
    assert (scores["has_answer_f1"], scores["no_answer_f1"]) == (100.0, 50.0)
    # An answer that normalizes to nothing counts as unanswerable.
    assert metrics.score_v2({"4": ("the",)}, {"4": ""})["exact_match"] == 100.0


@pytest.mark.parametrize(
    "odds, expected",
    [
        ((-3.0, 0.5, 0.0, 2.0), 75),
        # All questions are best predicted as unanswerable.
        *((odds, 50) for odds in ((-1.0, -2.0, -3.0, -4.0), (0.0, 0.0, 0.0, 0.0), (3.0, 4.0, 1.0, 2.0))),
    ],
)
def test_applying_the_best_threshold_yields_its_f1(odds, expected):
    answers = {"a": ("x",), "b": ("y",), "c": (), "d": ()}
    predictions = {"a": "x", "b": "y", "c": "z", "d": "w"} if expected == 75 else dict.fromkeys(answers, "v")
    null_odds = dict(zip(answers, odds, strict=True))
    scores = metrics.question_scores_v2(answers, predictions)[1]
    threshold = metrics.best_threshold(answers, scores, predictions, null_odds)

    def score(limit: float) -> float:
        texts = {id_: "" if null_odds[id_] > limit else predictions[id_] for id_ in answers}
        return metrics.score_v2(answers, texts)["f1"]

    assert score(threshold) == max(map(score, (-9, *odds, 9))) == expected
