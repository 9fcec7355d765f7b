"""Entity F1 on cases worked out by `conlleval`'s rules, and beside `conlleval` itself on tags of any kind."""

import random

import pytest
from conlleval import evaluate

from bertjax.errors import UsageError
from bertjax.metrics.entities import chunks, entity_scores, has_entities


@pytest.mark.parametrize(
    "tags, found",
    [
        ("I-PER I-PER O", {(0, 2, "PER")}),
        ("B-PER I-PER O", {(0, 2, "PER")}),
        ("I-PER B-PER I-PER", {(0, 1, "PER"), (1, 3, "PER")}),
        ("I-PER I-LOC", {(0, 1, "PER"), (1, 2, "LOC")}),
        ("O I-LOC", {(1, 2, "LOC")}),
        ("B-LOC I-PER I-PER", {(0, 1, "LOC"), (1, 3, "PER")}),
        ("B-LOC B-LOC", {(0, 1, "LOC"), (1, 2, "LOC")}),
        ("O O", set()),
    ],
)
def test_chunks_of_iob1_and_iob2(tags, found):
    assert chunks(tags.split()) == found


def test_a_chunk_is_right_with_both_ends_and_its_type():
    wanted = [["I-PER", "I-PER", "O", "I-LOC"], ["I-ORG", "O"]]
    predicted = [["I-PER", "O", "O", "I-LOC"], ["I-LOC", "O"]]
    scores = entity_scores(wanted, predicted)
    assert scores["precision"] == pytest.approx(100 / 3) and scores["recall"] == pytest.approx(100 / 3)
    assert scores["f1_LOC"] == pytest.approx(200 / 3) and scores["f1_PER"] == scores["f1_ORG"] == 0.0


def test_no_entity_crosses_a_sentence():
    one, two = [["I-PER", "I-PER"]], [["I-PER"], ["I-PER"]]
    assert entity_scores(two, two)["f1"] == 100.0
    assert chunks(two[0]) != chunks(one[0])


def test_nothing_predicted_is_nothing_right():
    assert entity_scores([["I-PER"]], [["O"]])["f1"] == 0.0


def test_any_tags_have_the_scores_that_conlleval_gives_them():
    rng = random.Random(0)
    tags = ["O", "B-A", "I-A", "B-B", "I-B", "I-C", "B-C"]
    for _ in range(50):
        wanted = [rng.choices(tags, k=rng.randint(1, 12)) for _ in range(rng.randint(1, 20))]
        predicted = [[tag if rng.random() < 0.6 else rng.choice(tags) for tag in sentence] for sentence in wanted]
        lines = []
        for sentence, guess in zip(wanted, predicted, strict=True):
            lines += [*(f"word {tag} {other}" for tag, other in zip(sentence, guess, strict=True)), ""]
        theirs, ours = evaluate(lines), entity_scores(wanted, predicted)
        whole = theirs["overall"]["chunks"]["evals"]
        for name, key in (("precision", "prec"), ("recall", "rec"), ("f1", "f1")):
            assert ours[name] == pytest.approx(100 * whole[key], abs=1e-9)
        for kind, found in theirs["slots"]["chunks"].items():
            assert ours[f"f1_{kind}"] == pytest.approx(100 * found["evals"]["f1"], abs=1e-9)


def test_entities_are_told_from_other_tags():
    assert has_entities(["O", "B-PER", "I-LOC"]) and not has_entities(["O", "NOUN", "B-"]) and not has_entities(["O"])
    with pytest.raises(UsageError, match="the tags mix schemes: I-PER marks an entity, NOUN does not"):
        has_entities(["I-PER", "NOUN"])
