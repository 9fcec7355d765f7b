"""Truncation of pairs, and masking of tokens."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from bertjax.data.pretraining.config import Masking, Phase
from bertjax.data.pretraining.masking import choose_positions, replace_tokens
from bertjax.data.pretraining.rows import Spans, TokenRows, truncate_pairs
from bertjax.errors import UsageError


def spans(a_start, a_length, b_start, b_length, label=0) -> Spans:
    columns = np.broadcast_arrays(a_start, a_length, b_start, b_length, label)
    return Spans(*(tf.constant(np.ravel(column), tf.int64) for column in columns))


def random_bits(rows: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).integers(0, 2**64, (rows, 2), np.uint64))


def test_truncated_lengths_equal_dropping_one_token_at_a_time():
    room = 21
    a, b = np.meshgrid(np.arange(1, 60), np.arange(1, 60))
    cut = truncate_pairs(spans(1000, a, 2000, b), room, random_bits(a.size))
    for *lengths, a_kept, b_kept in zip(a.flat, b.flat, cut.a_length.numpy(), cut.b_length.numpy(), strict=True):
        while sum(lengths) > room:
            lengths[0 if lengths[0] > lengths[1] else 1] -= 1
        assert [a_kept, b_kept] == lengths
    # A truncated span lies inside the original span.
    for start, first, length, kept in ((cut.a_start, 1000, a, cut.a_length), (cut.b_start, 2000, b, cut.b_length)):
        front = start.numpy() - first
        assert front.min() == 0
        assert (front + kept.numpy() <= length.ravel()).all()


def test_number_of_tokens_dropped_from_the_front_is_binomial():
    rows, room = 20_000, 21
    for lost in (3, 64, 65, 400):
        cut = truncate_pairs(spans(0, 20 + lost, 10_000, 1), room, random_bits(rows))
        front = cut.a_start.numpy()
        assert abs(front.mean() - lost / 2) < 5 * np.sqrt(lost / 4 / rows)
        assert abs(front.var() / (lost / 4) - 1) < 0.06
        if lost == 3:
            counts = Counter(front.tolist())
            np.testing.assert_allclose([counts[n] / rows for n in range(4)], [1 / 8, 3 / 8, 3 / 8, 1 / 8], atol=0.015)
    # Segments A and B are truncated independently.
    cut = truncate_pairs(spans(0, 50, 1000, 50), 20, random_bits(rows))
    assert abs(np.corrcoef(cut.a_start, cut.b_start)[0, 1]) < 0.03


def example_rows(vocabulary, rows: int = 2000, seq_len: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids with special tokens inside the text, and random row lengths."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocabulary.size, (rows, seq_len), np.int32)
    ids[:, 0] = vocabulary.cls_id
    lengths = rng.integers(4, seq_len + 1, rows, np.int32)
    ids[np.arange(seq_len) >= lengths[:, None]] = vocabulary.pad_id
    ids[np.arange(rows), lengths - 1] = vocabulary.sep_id
    return ids, lengths


def masked(vocabulary, masking, max_predictions, ids, lengths):
    """Returns the masked ids, and the positions, original ids and weights of the predictions. A row has one span."""
    rows, seq_len = ids.shape
    uniforms = np.random.default_rng(1).random((rows, seq_len + 2 * max_predictions), np.float32)
    choice, others = uniforms[:, :seq_len], uniforms[:, seq_len:]
    phase = Phase(seq_len, rows, max_predictions, 0, 1, masking=masking)

    # As in the input pipeline, the number of rows is not static.
    @tf.function(input_signature=[tf.TensorSpec([None, seq_len], tf.int32), tf.TensorSpec([None], tf.int32)])
    def mask(ids, lengths):
        lengths = lengths[:, None]
        token_rows = TokenRows(ids, *[None] * 3, starts=tf.zeros_like(lengths), lengths=lengths, labels=None)
        positions = choose_positions(token_rows, tf.constant(choice), vocabulary, phase)
        return replace_tokens(ids, positions, tf.constant(others), vocabulary, masking)

    result = mask(ids, lengths)
    names = ("input_ids", "masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    return [result[name].numpy() for name in names]


def masked_tokens(positions, weights, seq_len: int = 40) -> np.ndarray:
    """Returns a mask of the predicted positions, int [rows, seq_len]."""
    chosen = np.zeros((len(positions), seq_len), int)
    rows, columns = np.nonzero(weights)
    chosen[rows, positions[rows, columns]] = 1
    return chosen


def expected_number(lengths, rate, max_predictions):
    return np.array([min(max_predictions, max(1, round(int(n) * rate))) for n in lengths])


@pytest.mark.parametrize("choice", [{}, {"whole_word": True}, {"max_span": 4}])
@pytest.mark.parametrize("rate, max_predictions", [(0.15, 20), (0.25, 12), (0.15, 3), (1.0, 40)])
def test_number_of_masked_tokens_follows_the_rate_and_special_tokens_are_not_masked(
    vocabulary, choice, rate, max_predictions
):
    masking = Masking(rate=rate, **choice)
    ids, lengths = example_rows(vocabulary)
    inputs, positions, originals, weights = masked(vocabulary, masking, max_predictions, ids, lengths)
    used = weights == 1
    assert set(np.unique(weights)) <= {0.0, 1.0}
    chosen = masked_tokens(positions, weights) == 1
    assert chosen.sum() == used.sum()
    assert not np.isin(ids[chosen], vocabulary.special_ids).any()
    np.testing.assert_array_equal(inputs[~chosen], ids[~chosen])
    np.testing.assert_array_equal(originals[used], np.take_along_axis(ids, positions, 1)[used])
    # Positions are ascending. Unused predictions are zero and come last.
    assert (np.diff(np.where(used, positions, 1000), axis=1)[used[:, 1:]] > 0).all()
    assert (np.diff(weights, axis=1) <= 0).all()
    assert not positions[~used].any() and not originals[~used].any()
    if not choice:
        candidates = (~np.isin(ids, vocabulary.special_ids)).sum(axis=1)
        expected = np.minimum(expected_number(lengths, rate, max_predictions), candidates)
        np.testing.assert_array_equal(weights.sum(axis=1), expected)


def test_ordinary_tokens_are_masked_with_equal_probability(vocabulary):
    ids, lengths = example_rows(vocabulary, 20_000)
    _, positions, _, weights = masked(vocabulary, Masking(rate=0.2), 8, ids, lengths)
    candidates = ~np.isin(ids, vocabulary.special_ids)
    chosen = masked_tokens(positions, weights)
    expected = (candidates * (weights.sum(axis=1) / np.maximum(1, candidates.sum(axis=1)))[:, None]).sum(axis=0)
    assert chosen[:, 1:-1].sum(axis=0) == pytest.approx(expected[1:-1], rel=0.12)


@pytest.mark.parametrize("probs", [(0.8, 0.1, 0.1), (1, 0, 0), (0.8, 0, 0.2), (0, 0.2, 0.8), (0, 0, 1)])
def test_replacements_follow_the_mask_keep_and_random_probabilities(vocabulary, probs):
    masking = Masking(0.25, *probs)
    inputs, positions, originals, weights = masked(vocabulary, masking, 10, *example_rows(vocabulary, 8000))
    used = weights == 1
    seen = np.take_along_axis(inputs, positions, 1)[used]
    originals = originals[used]
    ordinary = vocabulary.size - 5
    mask, same = seen == vocabulary.mask_id, seen == originals
    assert mask.mean() == pytest.approx(probs[0], abs=0.01)
    # A random replacement may equal the original token.
    assert same.mean() == pytest.approx(probs[1] + probs[2] / ordinary, abs=0.01)
    replaced = seen[~mask & ~same]
    assert not np.isin(replaced, vocabulary.special_ids).any()
    if probs[2]:
        assert len(np.unique(replaced)) == ordinary


def test_whole_words_are_masked_completely_and_within_the_limit(vocabulary):
    max_predictions = 8
    masking = Masking(rate=0.2, whole_word=True)
    ids, lengths = example_rows(vocabulary)
    _, positions, _, weights = masked(vocabulary, masking, max_predictions, ids, lengths)
    numbers = expected_number(lengths, 0.2, max_predictions)
    assert (weights.sum(axis=1) <= numbers).all()
    candidates = ~np.isin(ids, vocabulary.special_ids)
    continues = vocabulary.is_continuation[ids]
    # Each piece is masked if and only if the piece before it in the same word is masked.
    in_word, chosen = continues[:, 1:] & candidates[:, :-1], masked_tokens(positions, weights)
    np.testing.assert_array_equal(chosen[:, 1:][in_word], chosen[:, :-1][in_word])
    assert chosen[:, 1:][in_word].sum() > 1000
    # bertjax skips at most two words that do not fit. The loop below skips all such words, like google-research/bert.
    # Both make nearly the same number of predictions.
    rng = np.random.default_rng(2)
    greedy = 0
    for row, number in enumerate(numbers):
        starts = candidates[row] & ~(continues[row] & np.roll(candidates[row], 1))
        sizes = np.bincount(np.cumsum(starts)[candidates[row]])
        left = number
        for size in rng.permutation(sizes[sizes > 0]):
            left -= size if size <= left else 0
        greedy += number - left
    assert weights.sum() == pytest.approx(greedy, rel=0.01)


def run_lengths(vocabulary, masking):
    """Returns the lengths of the runs of masked positions in long rows whose words are single pieces."""
    rows, seq_len = 400, 256
    words = np.setdiff1d(np.flatnonzero(~vocabulary.is_continuation), vocabulary.special_ids)
    ids = np.random.default_rng(0).choice(words, (rows, seq_len)).astype(np.int32)
    _, positions, _, weights = masked(vocabulary, masking, 39, ids, np.full(rows, seq_len, np.int32))
    chosen = np.pad(masked_tokens(positions, weights, seq_len), ((0, 0), (1, 1)))
    starts, ends = (np.nonzero(np.diff(chosen) == change)[1] for change in (1, -1))
    return ends - starts


def test_spans_of_words_have_geometric_lengths(vocabulary):
    lengths = run_lengths(vocabulary, Masking(max_span=10))
    # SpanBERT's mean is 3.8 words. Here, long spans are split, and adjacent spans count as one.
    assert 3.5 < lengths.mean() < 5 and 0.15 < (lengths == 1).mean() < 0.25
    assert run_lengths(vocabulary, Masking(max_span=3)).mean() == pytest.approx(2.8, abs=0.5)
    assert run_lengths(vocabulary, Masking()).mean() < 1.3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"rate": 0.0}, "rate is 0.0; it must be above 0"),
        ({"rate": 1.5}, "rate is 1.5; it must be at most 1"),
        ({"mask_prob": 0.7}, "add up to 0.9"),
        ({"mask_prob": 1.1, "keep_prob": -0.2}, "mask_prob is 1.1; it must be at most 1"),
    ],
)
def test_invalid_settings_are_rejected(arguments, message):
    with pytest.raises(UsageError, match=message):
        Masking(**arguments)
