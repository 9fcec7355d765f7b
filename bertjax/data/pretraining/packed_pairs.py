"""Rows of several sentence pairs each, for masked LM with next-sentence prediction.

The pairs are those of `sentence_pairs`, cut, truncated and masked alike, each alone; a row has as many as fit into it.
Every pair of an epoch is in exactly one row.

B rows, N pairs, S tokens a row, P predictions a row, K pairs a row at most.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from bertjax.corpus.store import Corpus
from bertjax.corpus.tokenizer import Vocabulary
from bertjax.data.pretraining.assembly import Assembled
from bertjax.data.pretraining.masking import chooser, parts, replacer
from bertjax.data.pretraining.plan import pair_plan
from bertjax.data.pretraining.rows import Spans, epoch_order, packed_pairs, pair_lookup, stream_key
from bertjax.data.pretraining.sentence_pairs import SENTENCE_PAIRS
from bertjax.data.pretraining.settings import PACKED_BATCH, PAIRS_A_ROW, Masking, Phase, packed_predictions
from bertjax.data.pretraining.source import ORDER, Lookup, Prediction


class _Joined(NamedTuple):
    """Of each position of rows that parts of several pairs are joined in, int32 [B, width].

    Attributes:
      which: of its row's pairs; K where there is none.
      index: of what stands there, in the pairs' parts laid flat; 0 where there is none.
      offset: within its pair.
    """

    which: tf.Tensor
    index: tf.Tensor
    offset: tf.Tensor


def _joined(counts: tf.Tensor, place: tf.Tensor, rows: int, stride: int, width: int) -> tuple[_Joined, tf.Tensor]:
    """Where the parts of a row's pairs come to lie, one behind the other.

    Args:
      counts: int32 [N], how long each pair's part is.
      place: of the pairs.
      rows: B.
      stride: from one pair's part to the next, laid flat.
      width: of a row.

    Returns:
      What stands at each position, and where each pair's part starts, int32 [N].
    """
    places = rows * PAIRS_A_ROW
    row_counts = tf.reshape(tf.scatter_nd(place[:, None], counts, [places]), [rows, PAIRS_A_ROW])
    ends = tf.cumsum(row_counts, axis=1)
    starts = ends - row_counts
    position = tf.tile(tf.range(width)[None], [rows, 1])
    which = tf.searchsorted(ends, position, side="right")  # [B, width]
    there = which < PAIRS_A_ROW
    pair_of_place = tf.scatter_nd(place[:, None], tf.range(tf.size(counts)), [places])
    # Of each place what a position's index is without the position.
    first = tf.reshape(pair_of_place * stride, [rows, PAIRS_A_ROW]) - starts
    known = tf.minimum(which, PAIRS_A_ROW - 1)
    index = tf.where(there, tf.gather(first, known, batch_dims=1) + position, 0)
    offset = tf.where(there, position - tf.gather(starts, known, batch_dims=1), 0)
    return _Joined(which, index, offset), tf.gather(tf.reshape(starts, [-1]), place)


def _predictions(masking: Masking, seq_len: int, max_predictions: int) -> int:
    return packed_predictions(masking.rate, seq_len, max_predictions, PAIRS_A_ROW)


def _maker(
    vocabulary: Vocabulary, masking: Masking, seq_len: int, max_predictions: int, rows: int
) -> Callable[[Assembled, Spans, tf.Tensor], dict[str, tf.Tensor]]:
    row_predictions = _predictions(masking, seq_len, max_predictions)
    choose = chooser(vocabulary, masking, seq_len, max_predictions)
    replace = replacer(vocabulary, masking, seq_len, row_predictions)

    def make(pairs: Assembled, spans: Spans, uniforms: tf.Tensor) -> dict[str, tf.Tensor]:
        choice, others = tf.split(uniforms, [seq_len, 2 * row_predictions], axis=1)
        tokens, starts = _joined(pairs.lengths, spans.place, rows, seq_len, seq_len)
        there = tokens.which < PAIRS_A_ROW

        def in_rows(values: tf.Tensor, padding: int) -> tf.Tensor:
            return tf.where(there, tf.gather(tf.reshape(values, [-1]), tokens.index), padding)

        # Each token has the number of its position in the row; what is behind a pair's last is not looked at.
        row = tf.cast(spans.place // PAIRS_A_ROW, tf.int32)
        position = tf.minimum(starts[:, None] + tf.range(seq_len), seq_len - 1)
        chosen = choose(
            pairs.ids, pairs.lengths, tf.gather(tf.reshape(choice, [-1]), row[:, None] * seq_len + position)
        )
        counts = tf.math.count_nonzero(chosen < seq_len, axis=1, dtype=tf.int32)
        predicted, _ = _joined(counts, spans.place, rows, max_predictions, row_predictions)
        in_row = tf.gather(tf.reshape(chosen + starts[:, None], [-1]), predicted.index)
        positions = tf.where(predicted.which < PAIRS_A_ROW, in_row, seq_len)
        labels = tf.tensor_scatter_nd_update(
            tf.fill([rows * PAIRS_A_ROW], -1), spans.place[:, None], tf.cast(spans.label, tf.int32)
        )
        return {
            **parts(replace(in_rows(pairs.ids, vocabulary.pad_id), positions, others)),
            "segment_ids": in_rows(pairs.segment_ids, 0),
            "sequence_ids": tf.where(there, tokens.which + 1, 0),
            "position_ids": tokens.offset,
            "next_sentence_labels": tf.reshape(labels, [rows, PAIRS_A_ROW]),
        }

    return make


def _train(corpus: Corpus, phase: Phase, seed: int, passes: int, shuffle: bool) -> Lookup:
    plan = pair_plan(corpus, "train", phase.seq_len, seed, passes, PAIRS_A_ROW)
    order = epoch_order(plan.pass_ends, stream_key(seed, phase.start_step, ORDER), shuffle)
    pairs_of, spans = packed_pairs(plan.runs, PAIRS_A_ROW), pair_lookup(plan)

    def lookup(positions: tf.Tensor) -> tuple[tf.Tensor, Spans]:
        pairs, place = pairs_of(order(positions)[0])
        return pairs, spans(pairs)._replace(place=place)

    return lookup


def _train_plan(corpus: Corpus, seq_len: int, seed: int, passes: int) -> Path:
    return pair_plan(corpus, "train", seq_len, seed, passes, PAIRS_A_ROW).path


def _uniforms(masking: Masking, seq_len: int, max_predictions: int) -> int:
    return seq_len + 2 * _predictions(masking, seq_len, max_predictions)


PACKED_PAIRS = dataclasses.replace(
    SENTENCE_PAIRS,
    prediction=Prediction(PACKED_BATCH, _uniforms, _maker),
    spans_a_row=PAIRS_A_ROW,
    train=_train,
    train_plan=_train_plan,
    heldout_like=SENTENCE_PAIRS,
)
