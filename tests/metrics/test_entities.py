"""Entity F1 on cases worked out by `conlleval`'s rules."""

import pytest

from bertjax.metrics.entities import chunks, entity_scores


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
