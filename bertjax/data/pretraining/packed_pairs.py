"""Rows of several sentence pairs each, for masked LM with next-sentence prediction.

The pairs are those of `sentence_pairs`, cut, truncated and masked alike, each alone; a row has as many as fit into it.
Every pair of an epoch is in exactly one row.

B rows, N pairs, S tokens a row, P predictions a row, K pairs a row at most.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.corpus.tokenizer import Vocabulary
from bertjax.data.pretraining.assembly import Assembled
from bertjax.data.pretraining.config import (
    PACKED_BATCH,
    PAIRS_A_ROW,
    Masking,
    Phase,
    packed_predictions,
    prediction_numbers,
)
from bertjax.data.pretraining.masking import chooser, fields_of, replacer
from bertjax.data.pretraining.pair_index import pair_plan
from bertjax.data.pretraining.rows import Spans, epoch_order, packed_pairs, pair_lookup, stream_key
from bertjax.data.pretraining.sentence_pairs import SENTENCE_PAIRS
from bertjax.data.pretraining.source import ORDER, Lookup, Prediction


class _Joining:
    """Where the parts of a row's pairs come to lie, one behind the other.

    Most rows hold one pair, so each row's first pair is copied whole and the others are scattered behind it.
    """

    def __init__(self, place: tf.Tensor, lengths: tf.Tensor, width: int) -> None:
        """Of parts of `lengths` tokens, int32 [N], that lie in arrays [N, width], at `place`, see `Spans`."""
        row, nth = tf.cast(place // PAIRS_A_ROW, tf.int32), place % PAIRS_A_ROW
        self._first = tf.where(nth == 0)[:, 0]
        before = tf.cumsum(lengths, exclusive=True)
        # int32 [N], where in its row each part starts.
        self.starts = before - tf.gather(tf.gather(before, self._first), row)
        later = tf.where(nth > 0)[:, 0]
        inside = tf.where(tf.range(width) < tf.gather(lengths, later)[:, None])
        pair, offset = tf.gather(later, inside[:, 0]), inside[:, 1]
        # int64 [tokens of later pairs, 2], in arrays of pairs and of rows.
        self.in_pairs = tf.stack([pair, offset], axis=1)
        start = tf.cast(tf.gather(self.starts, pair), tf.int64)
        self.in_rows = tf.stack([tf.cast(tf.gather(row, pair), tf.int64), start + offset], axis=1)
        self.row = row

    def joined(self, parts: tf.Tensor) -> tf.Tensor:
        """[N, width], what is beyond a part's length being padding, to [B, width]."""
        return tf.tensor_scatter_nd_update(
            tf.gather(parts, self._first), self.in_rows, tf.gather_nd(parts, self.in_pairs)
        )

    def parted(self, rows: tf.Tensor) -> tf.Tensor:
        """[B, width] to [N, width]; what is beyond a part's length is no matter."""
        return tf.tensor_scatter_nd_update(tf.gather(rows, self.row), self.in_pairs, tf.gather_nd(rows, self.in_rows))


def _predictions(masking: Masking, seq_len: int, max_predictions: int) -> int:
    return packed_predictions(masking.rate, seq_len, max_predictions, PAIRS_A_ROW)


def _maker(
    vocabulary: Vocabulary, masking: Masking, seq_len: int, max_predictions: int
) -> Callable[[Assembled, Spans, tf.Tensor], dict[str, tf.Tensor]]:
    row_predictions = _predictions(masking, seq_len, max_predictions)
    # Of one pair: there may be room for more than it can have.
    most = max(prediction_numbers(masking.rate, seq_len, max_predictions))
    choose = chooser(vocabulary, masking, seq_len, most)
    replace = replacer(vocabulary, masking, seq_len)

    def make(pairs: Assembled, spans: Spans, uniforms: tf.Tensor) -> dict[str, tf.Tensor]:
        choice, others = tf.split(uniforms, [seq_len, 2 * row_predictions], axis=1)
        tokens = _Joining(spans.place, pairs.lengths, seq_len)
        # Each token has the number of its position in the row.
        chosen = choose(pairs.ids, pairs.lengths, tokens.parted(choice))
        used = chosen < seq_len
        in_row = tf.where(used, chosen + tokens.starts[:, None], seq_len)
        unused = tf.fill([tf.shape(chosen)[0], row_predictions - most], seq_len)
        predictions = _Joining(spans.place, tf.math.count_nonzero(used, axis=1, dtype=tf.int32), most)
        positions = predictions.joined(tf.concat([in_row, unused], axis=1))
        is_token = tf.cast(tf.range(seq_len) < pairs.lengths[:, None], tf.int32)
        number = tf.cast(spans.place % PAIRS_A_ROW + 1, tf.int32)
        labels = tf.tensor_scatter_nd_update(
            tf.fill([tf.shape(uniforms)[0] * PAIRS_A_ROW], -1), spans.place[:, None], tf.cast(spans.label, tf.int32)
        )
        return {
            **fields_of(replace(tokens.joined(pairs.ids), positions, others)),
            "segment_ids": tokens.joined(pairs.segment_ids),
            "sequence_ids": tokens.joined(number[:, None] * is_token),
            "position_ids": tokens.joined(tf.range(seq_len) * is_token),
            "next_sentence_labels": tf.reshape(labels, [-1, PAIRS_A_ROW]),
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
