"""Tests of entity F1 on hand-made cases and against `conlleval` on random tags."""

import random

import pytest
from conlleval import evaluate

from bertjax.metrics.entities import entity_scores, extract_entities, has_entities


@pytest.mark.parametrize(
    "tags, entities",
    [
        ("B-A I-A E-A S-B O B-A", {(0, 3, "A"), (3, 4, "B"), (5, 6, "A")}),
        ("B-A I-A L-A U-B", {(0, 3, "A"), (3, 4, "B")}),
        ("B-A M-A E-A S-B", {(0, 3, "A"), (3, 4, "B")}),
        # These sequences are invalid. The entities are those of seqeval.
        ("E-A E-A", {(0, 1, "A"), (1, 2, "A")}),
        ("S-A I-A E-A O", {(0, 1, "A"), (1, 3, "A")}),
        ("B-A E-B", {(0, 1, "A"), (1, 2, "B")}),
        ("B-A S-A", {(0, 1, "A"), (1, 2, "A")}),
        ("I-A L-A I-A", {(0, 2, "A"), (2, 3, "A")}),
    ],
)
def test_entities_of_every_scheme_are_extracted(tags, entities):
    assert extract_entities(tags.split()) == entities


def test_scores_of_random_tags_match_conlleval():
    rng = random.Random(0)
    tags = ["O", "B-A", "I-A", "B-B", "I-B", "I-C", "B-C"]
    for _ in range(50):
        labels = [rng.choices(tags, k=rng.randint(1, 12)) for _ in range(rng.randint(1, 20))]
        predictions = [[tag if rng.random() < 0.6 else rng.choice(tags) for tag in sentence] for sentence in labels]
        lines = []
        for label_tags, predicted_tags in zip(labels, predictions, strict=True):
            lines += [*(f"word {label} {tag}" for label, tag in zip(label_tags, predicted_tags, strict=True)), ""]
        reference, scores = evaluate(lines), entity_scores(labels, predictions)
        overall = reference["overall"]["chunks"]["evals"]
        for name, key in (("precision", "prec"), ("recall", "rec"), ("f1", "f1")):
            assert scores[name] == pytest.approx(100 * overall[key], abs=1e-9)
        for type_, slot in reference["slots"]["chunks"].items():
            assert scores[f"f1_{type_}"] == pytest.approx(100 * slot["evals"]["f1"], abs=1e-9)


def test_tags_without_a_type_mark_entities():
    tags = ["B", "I", "O", "I", "B", "S", "E"]
    spans = [(0, 2), (3, 4), (4, 5), (5, 6), (6, 7)]
    assert extract_entities(tags) == {(*span, "entity") for span in spans}
    assert entity_scores([tags], [["B", "O", "O", "B", "B", "S", "E"]])["f1_entity"] == pytest.approx(80)


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        *(("B-PER M-PER L-PER U-PER", True), ("O B-PER I-LOC", True), ("O B I", True)),
        *(("S-noun verb", False), ("O NOUN B-", False), ("O I NOUN", False), ("O", False)),
    ],
)
def test_has_entities_distinguishes_entity_tags_from_other_tags(tags, expected):
    assert has_entities(tags.split()) == expected
