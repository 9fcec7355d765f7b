"""Rows of one or several sentence pairs, for masked LM with next-sentence prediction.

An epoch is one pass of `pairs.document_pairs` over the training documents. Training cycles through several independent
passes. Pairs are truncated to S - 3 tokens. In packed rows, each pair is truncated and masked independently.

Axes: B rows, N pairs, K pairs per row, S tokens per row, P predictions per row.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.pretraining.assembly import TokenRows
from bertjax.data.pretraining.config import (
    MAX_PAIRS_PER_ROW,
    PACKED_BATCH,
    Masking,
    Phase,
    max_packed_predictions,
    predictions_by_length,
)
from bertjax.data.pretraining.formatting import format_packed_row
from bertjax.data.pretraining.masking import MASKED_LM, make_chooser, make_replacer, masked_fields
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.pretraining.rows import Spans, epoch_order, packed_pair_lookup, pair_lookup, stream_key
from bertjax.data.pretraining.source import EVAL_SEED, ORDER, Lookup, RowFormat, RowSource


def _train_single(corpus: Corpus, phase: Phase, seed: int, passes: int, shuffle: bool) -> Lookup:
    index = open_pair_index(corpus, "train", phase.seq_len, seed, passes)
    order = epoch_order(index.pass_ends, stream_key(seed, phase.start_step, ORDER), shuffle)
    pairs = pair_lookup(index)

    def lookup(positions: tf.Tensor) -> tuple[tf.Tensor, Spans]:
        row = order(positions)[0]
        return row, pairs(row)

    return lookup


def _heldout(corpus: Corpus, seq_len: int) -> tuple[int, Callable[[tf.Tensor], Spans]]:
    index = open_pair_index(corpus, "heldout", seq_len, EVAL_SEED, 1)
    return len(index.records), pair_lookup(index)


SENTENCE_PAIRS = RowSource(MASKED_LM, 1, True, _train_single, _heldout)


class _RowLayout:
    """Layout of packed rows, which contain one pair after the other.

    Since most rows contain one pair, whole first pairs are copied, and only the entries of other pairs are scattered.

    Attributes:
      starts: start of each pair in its row, int32 [N].
    """

    def __init__(self, slots: tf.Tensor, lengths: tf.Tensor, width: int) -> None:
        """Computes the layout for arrays [N, width] with one padded pair per row.

        Args:
          slots: row and index of each pair, see `Spans`.
          lengths: number of used entries of each pair, int32 [N].
          width: number of entries of a row.
        """
        row, nth = tf.cast(slots // MAX_PAIRS_PER_ROW, tf.int32), slots % MAX_PAIRS_PER_ROW
        self._first = tf.where(nth == 0)[:, 0]
        before = tf.cumsum(lengths, exclusive=True)
        self.starts = before - tf.gather(tf.gather(before, self._first), row)
        later = tf.where(nth > 0)[:, 0]
        inside = tf.where(tf.range(width) < tf.gather(lengths, later)[:, None])
        pair, offset = tf.gather(later, inside[:, 0]), inside[:, 1]
        # Indices [entries, 2] of the entries of second and later pairs, in arrays of pairs and in arrays of rows.
        self._pair_indices = tf.stack([pair, offset], axis=1)
        start = tf.cast(tf.gather(self.starts, pair), tf.int64)
        self._row_indices = tf.stack([tf.cast(tf.gather(row, pair), tf.int64), start + offset], axis=1)
        self._row = row

    def join(self, parts: tf.Tensor) -> tf.Tensor:
        """Joins pairs [N, width], padded beyond their lengths, to rows [B, width]."""
        return tf.tensor_scatter_nd_update(
            tf.gather(parts, self._first), self._row_indices, tf.gather_nd(parts, self._pair_indices)
        )

    def split(self, rows: tf.Tensor) -> tf.Tensor:
        """Splits rows [B, width] into pairs [N, width], with arbitrary values beyond the pairs' lengths."""
        return tf.tensor_scatter_nd_update(
            tf.gather(rows, self._row), self._pair_indices, tf.gather_nd(rows, self._row_indices)
        )


def _max_predictions(masking: Masking, seq_len: int, max_predictions: int) -> int:
    return max_packed_predictions(masking.rate, seq_len, max_predictions, MAX_PAIRS_PER_ROW)


def _packed_batch_function(
    vocabulary: Vocabulary, masking: Masking, seq_len: int, max_predictions: int
) -> Callable[[TokenRows, Spans, tf.Tensor], dict[str, tf.Tensor]]:
    row_predictions = _max_predictions(masking, seq_len, max_predictions)
    pair_predictions = max(predictions_by_length(masking.rate, seq_len, max_predictions))
    choose = make_chooser(vocabulary, masking, seq_len, pair_predictions)
    replace = make_replacer(vocabulary, masking, seq_len)

    def make_batch(pairs: TokenRows, spans: Spans, uniforms: tf.Tensor) -> dict[str, tf.Tensor]:
        choice, others = tf.split(uniforms, [seq_len, 2 * row_predictions], axis=1)
        tokens = _RowLayout(spans.slots, pairs.lengths, seq_len)
        # Split the random numbers like the rows, so that a token's number depends only on its position in the row.
        chosen = choose(pairs.ids, pairs.lengths, tokens.split(choice))
        used = chosen < seq_len
        in_row = tf.where(used, chosen + tokens.starts[:, None], seq_len)
        unused = tf.fill([tf.shape(chosen)[0], row_predictions - pair_predictions], seq_len)
        predictions = _RowLayout(spans.slots, tf.math.count_nonzero(used, axis=1, dtype=tf.int32), pair_predictions)
        positions = predictions.join(tf.concat([in_row, unused], axis=1))
        is_token = tf.cast(tf.range(seq_len) < pairs.lengths[:, None], tf.int32)
        pair_numbers = tf.cast(spans.slots % MAX_PAIRS_PER_ROW + 1, tf.int32)
        labels = tf.tensor_scatter_nd_update(
            tf.fill([tf.shape(uniforms)[0] * MAX_PAIRS_PER_ROW], -1),
            spans.slots[:, None],
            tf.cast(spans.label, tf.int32),
        )
        return {
            **masked_fields(replace(tokens.join(pairs.ids), positions, others)),
            "segment_ids": tokens.join(pairs.segment_ids),
            "sequence_ids": tokens.join(pair_numbers[:, None] * is_token),
            "position_ids": tokens.join(tf.range(seq_len) * is_token),
            "next_sentence_labels": tf.reshape(labels, [-1, MAX_PAIRS_PER_ROW]),
        }

    return make_batch


def _train_packed(corpus: Corpus, phase: Phase, seed: int, passes: int, shuffle: bool) -> Lookup:
    index = open_pair_index(corpus, "train", phase.seq_len, seed, passes, MAX_PAIRS_PER_ROW)
    order = epoch_order(index.pass_ends, stream_key(seed, phase.start_step, ORDER), shuffle)
    lookup_pairs, lookup_spans = packed_pair_lookup(index.runs, MAX_PAIRS_PER_ROW), pair_lookup(index)

    def lookup(positions: tf.Tensor) -> tuple[tf.Tensor, Spans]:
        pairs, slots = lookup_pairs(order(positions)[0])
        return pairs, lookup_spans(pairs)._replace(slots=slots)

    return lookup


def _packed_num_uniforms(masking: Masking, seq_len: int, max_predictions: int) -> int:
    return seq_len + 2 * _max_predictions(masking, seq_len, max_predictions)


PACKED_PAIRS = dataclasses.replace(
    SENTENCE_PAIRS,
    row_format=RowFormat(
        schema=PACKED_BATCH,
        num_uniforms=_packed_num_uniforms,
        make_batch_function=_packed_batch_function,
        format_row=format_packed_row,
    ),
    spans_per_row=MAX_PAIRS_PER_ROW,
    train=_train_packed,
    heldout_source=SENTENCE_PAIRS,
)
