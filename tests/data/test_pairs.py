"""Tests of sentence pairs against a sequential implementation that processes one document at a time."""

import random

import numpy as np
import pytest
from small_corpora import random_documents

from bertjax.data.pretraining.pairs import NEXT_SENTENCE, SENTENCE_ORDER, document_pairs, target_lengths


def offsets(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    sentences = np.cumsum([0, *(length for document in documents for length in document)])
    return sentences, np.cumsum([0, *(len(document) for document in documents)])


def one_pass(
    documents: list[list[int]], max_tokens: int, seed: int, pass_index: int, pairing: str = NEXT_SENTENCE
) -> np.ndarray:
    sentences, firsts = offsets(documents)
    lengths = np.array([sum(document) for document in documents])
    targets = target_lengths(lengths, max_tokens, pass_index, np.random.default_rng(seed))
    rng = np.random.default_rng([seed, pass_index])
    return np.concatenate(list(document_pairs(sentences, firsts, 0, targets, rng, pairing)))


def expected_pairs(documents: list[list[int]], max_tokens: int, rng: random.Random) -> list[tuple[int, int, bool]]:
    """Returns, for each pair, the lengths of A and B before truncation, and whether B is random."""
    pairs = []
    for own, document in enumerate(documents):
        target = rng.randint(2, max_tokens) if rng.random() < 0.1 else max_tokens
        position = 0
        while position < len(document):
            stop = position + 1
            while stop < len(document) and sum(document[position:stop]) < target:
                stop += 1
            a_stop = position + 1 if stop == position + 1 else rng.randint(position + 1, stop - 1)
            a = sum(document[position:a_stop])
            if stop == position + 1 or rng.random() < 0.5:
                other = documents[rng.choice([d for d in range(len(documents)) if d != own])]
                start = rng.randrange(len(other))
                b = 0
                for length in other[start:]:
                    b += length
                    if b >= target - a:
                        break
                pairs.append((a, b, True))
                position = a_stop
            else:
                pairs.append((a, sum(document[a_stop:stop]), False))
                position = stop
    return pairs


@pytest.mark.parametrize("max_tokens", [61, 253])
def test_pair_distributions_match_the_sequential_implementation(max_tokens):
    documents, passes = random_documents(200, 0), 20
    rng = random.Random(5)
    expected = np.array([p for _ in range(passes) for p in expected_pairs(documents, max_tokens, rng)])
    ours = np.concatenate([one_pass(documents, max_tokens, 3, index) for index in range(passes)])
    ours = np.stack([ours["a_length"], ours["b_length"], ours["label"]], axis=1)

    assert len(ours) == pytest.approx(len(expected), rel=0.03)
    assert ours[:, 2].mean() == pytest.approx(expected[:, 2].mean(), abs=0.02)
    for random_next in (0, 1):
        ours_part, expected_part = ours[ours[:, 2] == random_next], expected[expected[:, 2] == random_next]
        for column in (0, 1):
            assert ours_part[:, column].mean() == pytest.approx(expected_part[:, column].mean(), rel=0.03)
            quantiles = np.linspace(0.05, 0.95, 10)
            found = np.quantile(ours_part[:, column], quantiles)
            assert found == pytest.approx(np.quantile(expected_part[:, column], quantiles), rel=0.1, abs=2)


def test_segment_b_is_the_next_text_or_from_another_document():
    documents = random_documents(40, 6)
    sentences, firsts = offsets(documents)
    records = one_pass(documents, 61, 0, 0)
    bounds = sentences[firsts]

    def document(offset: np.ndarray) -> np.ndarray:
        return np.searchsorted(bounds, offset, side="right") - 1

    a, b, b_last = (
        document(records["a_start"]),
        document(records["b_start"]),
        document(records["b_start"] + records["b_length"] - 1),
    )
    is_random = records["label"] == 1
    assert (a[is_random] != b[is_random]).all()
    np.testing.assert_array_equal(b, b_last)
    following = records["a_start"] + records["a_length"]
    np.testing.assert_array_equal(following[~is_random], records["b_start"][~is_random])
    np.testing.assert_array_equal(a[~is_random], b[~is_random])
    assert (records["b_length"] > 0).all()
    assert len(set(b[is_random].tolist())) > 20


def test_half_of_the_sentence_order_pairs_are_reversed():
    documents = random_documents(200, 0)
    pairs = one_pass(documents, 61, 3, 0, SENTENCE_ORDER)
    in_order = pairs["a_start"] + pairs["a_length"] == pairs["b_start"]
    is_reversed = pairs["b_start"] + pairs["b_length"] == pairs["a_start"]
    assert in_order[pairs["label"] == 0].all()
    assert is_reversed.sum() == pytest.approx(in_order.sum(), rel=0.1)
    # All other pairs have a chunk of one sentence as A, and B from another document.
    ends = np.cumsum([sum(document) for document in documents])
    others = pairs[~in_order & ~is_reversed]
    first, second = (np.searchsorted(ends, others[name], side="right") for name in ("a_start", "b_start"))
    assert (first != second).all() and 0 < len(others) < 0.3 * len(pairs)
    # Every token is in one A, or in one B of the same document.
    together = pairs[in_order | is_reversed]
    assert others["a_length"].sum() + together["a_length"].sum() + together["b_length"].sum() == ends[-1]


def test_each_document_has_a_short_target_length_in_one_of_ten_passes():
    lengths = np.random.default_rng(0).integers(5, 5000, 1000)
    targets = np.stack([target_lengths(lengths, 61, index, np.random.default_rng(1)) for index in range(10)])
    # A short target is uniform in 2 to 61, so it may also be 61.
    assert (targets < 61).sum(axis=0).max() == 1
    short = targets[targets < 61]
    assert len(short) == pytest.approx(1000 * 59 / 60, abs=2)
    counts = np.bincount(short)[2:]
    assert len(counts) == 59
    assert counts.min() >= 15 and counts.max() <= 18
