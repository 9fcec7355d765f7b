"""From a row's position in training to its spans of the corpus, at the same cost for every position.

B rows of N spans, one each unless they are packed; tensors are int64 [B], or [N] of spans, unless said otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from bertjax.data.pretraining.pair_index import PairPlan
from bertjax.data.pretraining.pairs import RECORD

# TensorFlow's default of 4 rounds leaves neighbours of epochs of a million rows close together (correlation 0.4);
# 24 cost 0.1 microseconds a row more.
_SHUFFLE_ROUNDS = 24


class Spans(NamedTuple):
    """Where the tokens of rows stand in the token array, before truncation.

    Attributes:
      a_start, a_length, b_start, b_length: token offsets and numbers of tokens; `b_length` is 0 without pairs.
      label: 0 IsNext, 1 NotNext, -1 without pairs.
      place: of packed rows, in ascending order: row of the batch * pairs a row at most + which pair of its row.
    """

    a_start: tf.Tensor
    a_length: tf.Tensor
    b_start: tf.Tensor
    b_length: tf.Tensor
    label: tf.Tensor
    place: tf.Tensor | None = None


def stream_key(*parts: int) -> np.uint64:
    """A 64-bit key of a stream of random numbers, from a seed and what tells the stream from others."""
    return np.random.SeedSequence(parts).generate_state(1, np.uint64)[0]


def epoch_order(
    pass_ends: np.ndarray, key: np.uint64, shuffle: bool
) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """The order in which training takes the rows of several passes, one pass an epoch, over and over.

    Args:
      pass_ends: [passes] int64, rows up to and with each pass; no pass is empty.
      key: every key gives every epoch another permutation of its pass.
      shuffle: False gives the identity.

    Returns:
      A function of positions to (row, epoch).
    """
    starts = np.concatenate([[0], pass_ends[:-1]])
    counts = pass_ends - starts
    total, passes = int(pass_ends[-1]), len(pass_ends)

    def order(positions: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        cycle, within = positions // total, positions % total
        pass_index = tf.searchsorted(pass_ends, within, side="right", out_type=tf.int64)
        epoch = cycle * passes + pass_index
        start = tf.gather(starts, pass_index)
        index = within - start
        if shuffle:
            index = tf.raw_ops.RandomIndexShuffle(
                index=index,
                seed=_epoch_seeds(key, epoch),
                max_index=tf.gather(counts, pass_index) - 1,
                rounds=_SHUFFLE_ROUNDS,
            )
        return start + index, epoch

    return order


def pair_lookup(plan: PairPlan) -> Callable[[tf.Tensor], Spans]:
    """A function of pairs of a plan, which of one pair a row are its rows, to their spans."""
    words = without_copy(plan.records.view(np.int32).reshape(-1, RECORD.itemsize // 4))

    def lookup(pairs: tf.Tensor) -> Spans:
        fields = tf.gather(words, pairs)  # int32 [N, 7]
        starts = tf.bitcast(tf.reshape(fields[:, :4], [-1, 2, 2]), tf.int64)  # [N, 2]
        a_length, b_length, label = tf.unstack(tf.cast(fields[:, 4:], tf.int64), axis=1)
        return Spans(starts[:, 0], a_length, starts[:, 1], b_length, label)

    return lookup


def packed_pairs(runs: np.ndarray, pairs_a_row: int) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Which pairs of a plan its rows have.

    Args:
      runs: of a `PairPlan`.
      pairs_a_row: at most.

    Returns:
      A function of rows to (pairs [N], their `place`).
    """
    run_rows, run_pairs = runs.T
    row_ends, pair_ends = np.cumsum(run_rows), np.cumsum(run_rows * run_pairs)

    def pairs_of(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        run = tf.searchsorted(row_ends, rows, side="right")
        number = tf.gather(run_pairs, run)
        # From the run's end, where both are known.
        first = tf.gather(pair_ends, run) - (tf.gather(row_ends, run) - rows) * number
        nth = tf.range(pairs_a_row, dtype=tf.int64)
        there = nth < number[:, None]  # [B, pairs_a_row]
        place = tf.where(tf.reshape(there, [-1]))[:, 0]
        return tf.boolean_mask(first[:, None] + nth, there), place

    return pairs_of


def tile_count(tokens: int, width: int) -> int:
    """Rows of one pass of `tile_lookup`."""
    return -(-tokens // width)


def tile_lookup(tokens: int, width: int, key: np.uint64 | None) -> Callable[[tf.Tensor, tf.Tensor], Spans]:
    """Tiles a ring of `tokens` tokens by spans of `width`, the last one shorter, from a random offset every epoch.

    Spans run over the ring's end: offsets are modulo `tokens`.

    Args:
      tokens: 1 or more.
      width: tokens a span.
      key: of the offsets; None starts at 0.

    Returns:
      A function of (row, epoch) to spans without B.
    """

    def lookup(rows: tf.Tensor, epochs: tf.Tensor) -> Spans:
        zero = tf.zeros_like(rows)
        offset = zero
        if key is not None:
            # A right shift keeps the number positive as a signed one.
            offset = tf.cast(tf.bitwise.right_shift(_hash(key, epochs), tf.constant(1, tf.uint64)), tf.int64) % tokens
        start = rows * width
        return Spans((offset + start) % tokens, tf.minimum(tokens - start, width), zero, zero, zero - 1)

    return lookup


def without_copy(array: np.ndarray) -> tf.Tensor:
    """A tensor over the memory of a memory-mapped array, so that a corpus may be larger than RAM."""
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _epoch_seeds(key: np.uint64, epochs: tf.Tensor) -> tf.Tensor:
    """uint32 [B, 3], unlike for neighbouring epochs: TensorFlow's shuffle mixes its seed too little by itself."""
    first = _hash(key, epochs)
    words = tf.bitcast(tf.stack([first, _mixed(first)], axis=1), tf.uint32)  # [B, 2, 2]
    return tf.reshape(words, [-1, 4])[:, :3]


def _hash(key: np.uint64, numbers: tf.Tensor) -> tf.Tensor:
    """uint64 [B]: the `numbers`-th value of the SplitMix64 generator (Steele, Lea and Flood, 2014) seeded by `key`."""
    return _mixed(tf.cast(numbers + 1, tf.uint64) * tf.constant(0x9E3779B97F4A7C15, tf.uint64) + key)


def _mixed(x: tf.Tensor) -> tf.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = _xor_shifted(x, shift) * tf.constant(factor, tf.uint64)
    return _xor_shifted(x, 31)


def _xor_shifted(x: tf.Tensor, shift: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, tf.constant(shift, tf.uint64)))
