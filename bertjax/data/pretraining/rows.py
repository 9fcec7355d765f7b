"""Lookup of the spans (token ranges of the corpus) that form a row, and assembly of token rows from spans.

The position of a row in training determines its spans. A lookup takes constant time.

Axes: B rows, N spans, S maximum sequences (spans) per row, L tokens per row; N = B unless rows are packed. Tensors are
int64 [B] or [N] unless stated.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.pretraining.pair_index import PairIndex
from bertjax.data.pretraining.pairs import RECORD

# Rounds of `RandomIndexShuffle`. With TensorFlow's default of 4, neighboring rows stay close to each other in epochs of
# a million rows (correlation 0.4). 24 rounds cost 0.1 microseconds more per row.
_SHUFFLE_ROUNDS = 24
_EXACT_BITS = 64


class Spans(NamedTuple):
    """Token ranges of segments A and B of sentence pairs. If rows do not contain pairs, their text is segment A."""

    a_start: tf.Tensor  # offset of A in tokens
    a_length: tf.Tensor  # tokens of A
    b_start: tf.Tensor  # offset of B in tokens
    b_length: tf.Tensor  # tokens of B. 0 if rows do not contain pairs.
    label: tf.Tensor  # 0 or 1, see `LABELS` in `pairs.py`. -1 if rows do not contain pairs.
    slots: Any = None  # row index * S + index in the row, per span, ascending (default: None, one span per row)


# Maps row numbers and epochs, int64 [B], to the spans of these rows.
Lookup = Callable[[tf.Tensor, tf.Tensor], Spans]


def stream_key(*parts: int) -> np.uint64:
    """Derives the 64-bit key of a random stream from seeds and the stream's purpose, such as masking."""
    return np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]


def epoch_order(pass_ends: np.ndarray, key: np.uint64) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function that maps training positions to (row numbers, epochs).

    The position of a row is the number of rows before it in its phase. An epoch trains on all rows of one pass (see
    `pair_index.py`), in a random order that differs in each epoch. After the last pass, training continues with the
    first one. `pass_ends` is the exclusive end row of each pass, int64 [passes]; no pass is empty.
    """
    starts = np.concatenate([[0], pass_ends[:-1]])
    counts = pass_ends - starts
    total, passes = int(pass_ends[-1]), len(pass_ends)

    def order(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        cycle, within = positions // total, tf.math.floormod(positions, total)
        pass_index = tf.searchsorted(pass_ends, within, side="right", out_type=tf.int64)
        epoch = cycle * passes + pass_index
        # Hash epochs to seeds, uint32 [B, 3], since TensorFlow's shuffle mixes similar seeds poorly.
        first = _hash(key, epoch)
        words = tf.bitcast(tf.stack([first, _mix(first)], axis=1), tf.uint32)  # [B, 2, 2]
        start = tf.gather(starts, pass_index)
        index = tf.raw_ops.RandomIndexShuffle(
            index=within - start,
            seed=tf.reshape(words, [-1, 4])[:, :3],
            max_index=tf.gather(counts, pass_index) - 1,
            rounds=_SHUFFLE_ROUNDS,
        )
        return start + index, epoch

    return order


def pair_lookup(index: PairIndex, max_pairs: int) -> Lookup:
    """Returns a `Lookup` for a pair index with at most `max_pairs` pairs per row. The lookup ignores the epoch."""
    words = without_copy(index.records.view(np.int32).reshape(-1, RECORD.itemsize // 4))
    run_rows, run_pairs = index.runs.T
    row_ends, pair_ends = np.cumsum(run_rows), np.cumsum(run_rows * run_pairs)

    def lookup(rows: tf.Tensor, epochs: tf.Tensor) -> Spans:
        run = tf.searchsorted(row_ends, rows, side="right")
        number = tf.gather(run_pairs, run)
        # Index of the row's first pair: the end of its run, minus `number` for this and each later row of the run.
        first = tf.gather(pair_ends, run) - (tf.gather(row_ends, run) - rows) * number
        nth = tf.range(max_pairs, dtype=tf.int64)
        exists = nth < number[:, None]  # [B, max_pairs]
        fields = tf.gather(words, tf.boolean_mask(first[:, None] + nth, exists))  # int32 [N, 7]
        starts = tf.bitcast(tf.reshape(fields[:, :4], [-1, 2, 2]), tf.int64)  # [N, 2]
        a_length, b_length, label = tf.unstack(tf.cast(fields[:, 4:], tf.int64), axis=1)
        slots = tf.where(tf.reshape(exists, [-1]))[:, 0]
        return Spans(starts[:, 0], a_length, starts[:, 1], b_length, label, slots)

    return lookup


def running_text_lookup(tokens: int, width: int, key: np.uint64 | None) -> tuple[np.ndarray, Lookup]:
    """Divides a split into rows of `width` consecutive tokens; the last row may be shorter.

    The first row starts at a random offset that changes every epoch (0 if `key` is None). Rows wrap around the end of
    the split.

    Returns:
      The number of rows per epoch, int64 [1], and a `Lookup`, whose spans are segment A.
    """

    def lookup(rows: tf.Tensor, epochs: tf.Tensor) -> Spans:
        zero = tf.zeros_like(rows)
        offset = zero
        if key is not None:
            # Shift right by one bit, so that the number is not negative as int64.
            shift = tf.bitwise.right_shift(_hash(key, epochs), tf.constant(1, tf.uint64))
            offset = tf.math.floormod(tf.cast(shift, tf.int64), tokens)
        start = rows * width
        return Spans(tf.math.floormod(offset + start, tokens), tf.minimum(tokens - start, width), zero, zero, zero - 1)

    return np.array([-(-tokens // width)]), lookup


def without_copy(array: np.ndarray) -> tf.Tensor:
    """Returns a tensor that shares the memory of a memory-mapped array, so that a corpus may be larger than RAM."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _hash(key: np.uint64, numbers: tf.Tensor) -> tf.Tensor:
    """Returns SplitMix64 values (Steele, Lea and Flood, 2014) of seed `key` at indices `numbers`, uint64 [B]."""
    return _mix(tf.cast(numbers + 1, tf.uint64) * tf.constant(0x9E3779B97F4A7C15, tf.uint64) + key)


def _mix(x: tf.Tensor) -> tf.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64)))
        x *= tf.constant(factor, tf.uint64)
    return x


class TokenRows(NamedTuple):
    """Padded token rows with special tokens. All tensors are int32."""

    ids: tf.Tensor  # token ids, [B, L]
    segment_ids: tf.Tensor  # 1 for segment B and the [SEP] after it, else 0, [B, L]
    sequence_ids: tf.Tensor  # index of each token's span in its row, starting at 1, or 0 for padding, [B, L]
    position_ids: tf.Tensor  # index of each token in its span, or 0 for padding, [B, L]
    starts: tf.Tensor  # for each position, the start of its span in the row, [B, L]; [B, 1] if rows have one span
    # Number of tokens in the span of each position, shaped like `starts`. Padding belongs to the last span of its row.
    lengths: tf.Tensor
    labels: tf.Tensor  # label of each span, [B, S], or -1 if there are fewer spans


def truncate_pairs(spans: Spans, max_tokens: int, bits: tf.Tensor) -> Spans:
    """Truncates pairs as `truncate_seq_pair` of google-research/bert `create_pretraining_data.py` does.

    `truncate_seq_pair` drops one token at a time from the longer segment, or from segment B if both are equally long.
    Each token is dropped from the front or the back with probability 1/2. Hence the remaining lengths have a closed
    form, and the number of tokens dropped from the front is binomial. `max_tokens` is the limit of both segments
    together, and `bits` are uniform random bits, uint64 [N, 2].
    """
    a_length = tf.minimum(spans.a_length, tf.maximum(max_tokens - spans.b_length, (max_tokens + 1) // 2))
    b_length = tf.minimum(spans.b_length, tf.maximum(max_tokens - spans.a_length, max_tokens // 2))
    return spans._replace(
        a_start=spans.a_start + _dropped_from_front(spans.a_length - a_length, bits[:, 0]),
        a_length=a_length,
        b_start=spans.b_start + _dropped_from_front(spans.b_length - b_length, bits[:, 1]),
        b_length=b_length,
    )


def _dropped_from_front(dropped: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Draws from Binomial(dropped, 1/2), int64 [N]. Uses the normal approximation above 64 trials."""
    used_bits = tf.bitwise.right_shift(
        bits, tf.cast(_EXACT_BITS - tf.clip_by_value(dropped, 1, _EXACT_BITS), tf.uint64)
    )
    exact = tf.where(dropped > 0, tf.cast(tf.raw_ops.PopulationCount(x=used_bits), tf.int64), 0)
    # A float64 has 53 significant bits. Adding 0.5 avoids 0, where `ndtri` is -inf.
    high_bits = tf.cast(tf.bitwise.right_shift(bits, tf.constant(11, tf.uint64)), tf.int64)
    uniform = (tf.cast(high_bits, tf.float64) + 0.5) * 2.0**-53
    number = tf.cast(dropped, tf.float64)
    normal = tf.cast(tf.round(number / 2 + tf.sqrt(number) / 2 * tf.math.ndtri(uniform)), tf.int64)
    return tf.where(dropped <= _EXACT_BITS, exact, tf.clip_by_value(normal, 0, dropped))


def assemble_rows(
    tokens: tf.Tensor, spans: Spans, seq_len: int, vocabulary: Vocabulary, paired: bool, max_sequences: int = 1
) -> TokenRows:
    """Assembles rows of spans `[CLS] A [SEP] B [SEP]`, or `[CLS] A [SEP]` if not `paired`, and pads them with [PAD].

    `tokens` are all tokens of a split. The spans of a row have at most `seq_len` tokens in total, including special
    tokens. If not `paired`, a span may wrap around the end of `tokens`. `max_sequences` is S.
    """
    lengths = tf.cast(spans.a_length + spans.b_length, tf.int32) + (3 if paired else 2)
    slots = tf.range(tf.shape(lengths, tf.int64)[0]) if spans.slots is None else spans.slots
    row, nth = (tf.cast(index, tf.int32) for index in (slots // max_sequences, slots % max_sequences))
    starts, span = tf.zeros_like(lengths), tf.range(tf.size(lengths))[:, None]
    if max_sequences > 1:
        before = tf.cumsum(lengths, exclusive=True)
        starts = before - tf.gather(tf.boolean_mask(before, nth == 0), row)
        # Number the spans: the number increases at the first token of each span.
        is_first = tf.scatter_nd(tf.stack([row, starts], 1), tf.ones_like(row), [row[-1] + 1, seq_len])
        span = tf.reshape(tf.cumsum(tf.reshape(is_first, [-1])) - 1, [-1, seq_len])
    at_position = functools.partial(tf.gather, indices=span)  # maps [N] to [B, L] ([B, 1] for one span per row)
    row_starts, row_lengths = at_position(starts), at_position(lengths)
    position = tf.range(seq_len) - row_starts  # [B, L]
    a_length = at_position(tf.cast(spans.a_length, tf.int32))
    a_end, last = a_length + 1, row_lengths - 1

    is_text = (position > 0) & (position != a_end) & (position < last)
    a_first, b_first = at_position(spans.a_start - 1), at_position(spans.b_start - spans.a_length - 2)
    index = tf.where(position <= a_length, a_first, b_first) + tf.cast(position, tf.int64)
    index = tf.where(is_text, index, 0)
    if not paired:
        size = tf.shape(tokens, tf.int64)[0]
        index = tf.where(index < size, index, index - size)
    special = tf.where(position == 0, vocabulary.cls_id, vocabulary.pad_id)
    special = tf.where((position == a_end) | (position == last), vocabulary.sep_id, special)
    is_token = tf.cast(position <= last, tf.int32)
    no_labels = tf.fill([tf.shape(span)[0], max_sequences], -1)
    return TokenRows(
        ids=tf.where(is_text, tf.cast(tf.gather(tokens, index), tf.int32), special),
        segment_ids=tf.cast(position > a_end, tf.int32) * is_token,
        sequence_ids=(at_position(nth) + 1) * is_token,
        position_ids=position * is_token,
        starts=row_starts,
        lengths=row_lengths,
        labels=tf.tensor_scatter_nd_update(no_labels, tf.stack([row, nth], 1), tf.cast(spans.label, tf.int32)),
    )
