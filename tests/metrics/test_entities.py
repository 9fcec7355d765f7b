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


def spelled(entities, words, scheme):
    """Tags of entities (first word, word after the last, type) that do not overlap."""
    inside, last, single = {"IOB2": "IIB", "BIOES": "IES", "BILOU": "ILU"}[scheme]
    tags = ["O"] * words
    for first, end, kind in entities:
        length = end - first
        prefixes = single if length == 1 else "B" + inside * (length - 2) + last
        tags[first:end] = [f"{prefix}-{kind}" for prefix in prefixes]
    return tags


def random_entities(rng, words):
    entities, place = set(), 0
    while place < words:
        end = min(words, place + rng.randint(1, 4))
        if rng.random() < 0.6:
            entities.add((place, end, rng.choice("AB")))
        place = end
    return entities


@pytest.mark.parametrize("scheme", ["IOB2", "BIOES", "BILOU"])
def test_every_scheme_has_the_entities_it_was_made_of(scheme):
    rng = random.Random(1)
    for _ in range(200):
        words = rng.randint(1, 15)
        entities = random_entities(rng, words)
        tags = spelled(entities, words, scheme)
        assert chunks(tags) == entities
        assert has_entities(tags) == bool(entities)


@pytest.mark.parametrize("scheme", ["BIOES", "BILOU"])
def test_scores_are_those_that_conlleval_gives_the_same_entities_in_iob2(scheme):
    rng = random.Random(2)
    sentences, lines = ([], []), []
    for _ in range(60):
        words = rng.randint(1, 15)
        pair = random_entities(rng, words), random_entities(rng, words)
        for side, entities in zip(sentences, pair, strict=True):
            side.append(spelled(entities, words, scheme))
        both = (spelled(entities, words, "IOB2") for entities in pair)
        lines += [*(f"word {tag} {other}" for tag, other in zip(*both, strict=True)), ""]
    theirs, ours = evaluate(lines)["overall"]["chunks"]["evals"], entity_scores(*sentences)
    assert 0 < ours["f1"] < 100
    for name, key in (("precision", "prec"), ("recall", "rec"), ("f1", "f1")):
        assert ours[name] == pytest.approx(100 * theirs[key], abs=1e-9)


@pytest.mark.parametrize(
    "tags, found",
    [
        ("E-A E-A", {(0, 1, "A"), (1, 2, "A")}),
        ("S-A I-A E-A O", {(0, 1, "A"), (1, 3, "A")}),
        ("B-A E-B", {(0, 1, "A"), (1, 2, "B")}),
        ("B-A S-A", {(0, 1, "A"), (1, 2, "A")}),
        ("I-A L-A I-A", {(0, 2, "A"), (2, 3, "A")}),
        ("B-A I-A", {(0, 2, "A")}),
    ],
)
def test_tags_that_follow_no_scheme_have_the_chunks_of_seqeval(tags, found):
    assert chunks(tags.split()) == found


def test_bioes_and_bilou_do_not_mix():
    with pytest.raises(UsageError, match="E- or S- of BIOES beside L- or U- of BILOU"):
        has_entities(["B-PER", "E-PER", "U-PER"])
    assert not has_entities(["S-noun", "verb"])


def test_entities_are_told_from_other_tags():
    assert has_entities(["O", "B-PER", "I-LOC"]) and not has_entities(["O", "NOUN", "B-"]) and not has_entities(["O"])
    with pytest.raises(UsageError, match="the tags mix schemes: I-PER marks an entity, NOUN does not"):
        has_entities(["I-PER", "NOUN"])
