"""Sources of batch rows: single sentence pairs, packed sentence pairs, and tiles of running text.

A span is the location of a sentence pair or a text in the token array of a corpus split.

Sentence pairs: an epoch is one pass of `pairs.document_pairs` over the training documents. Training cycles through
several independent passes. Pairs are truncated to L - 3 tokens. In packed rows, each pair is truncated and masked
independently.

Tiles: the rows of an epoch are consecutive spans of L - 2 tokens, so that each token of the split is in exactly one
row. The first span starts at a random offset that changes every epoch. Rows may cross the boundaries of sentences and
documents. In each epoch, one row may be shorter, and one row may wrap around the end of the split.

Axes: B rows, N pairs, K pairs per row, L tokens per row, P predictions per row.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.inspection import format_masked_row, format_unmasked_row
from bertjax.data.pretraining.config import (
    LANGUAGE_MODEL_BATCH,
    MASKED_LM_BATCH,
    MAX_PAIRS_PER_ROW,
    PACKED_BATCH,
    TILE_SPECIAL_TOKENS,
    Masking,
    Phase,
    num_predictions,
)
from bertjax.data.pretraining.masking import choose_positions, replace_tokens
from bertjax.data.pretraining.pair_index import open_pair_index
from bertjax.data.pretraining.pairs import LABELS
from bertjax.data.pretraining.rows import (
    Spans,
    TokenRows,
    epoch_order,
    packed_pair_lookup,
    pair_lookup,
    stream_key,
    tile_lookup,
)
from bertjax.data.schema import Schema

# Seed of the held-out rows, which are the same for all runs.
EVAL_SEED = 0
# Purposes of random streams, used as the last argument of `stream_key`.
ORDER, OFFSET, MASKS, TRUNCATION = range(4)
# Maps row numbers, int64 [B], to the spans of these rows. Training rows are numbered from the start of the phase.
Lookup = Callable[[tf.Tensor], Spans]
Batch = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Source of training and held-out rows, and their format in a batch.

    Attributes:
      schema: schema of a batch.
      make_batch: (token rows, spans, uniforms, vocabulary, masking, max_predictions) -> arrays of a batch. The uniforms
        are float32 [B, L + 2 P], where P is the maximum number of predictions of a row.
      format_row: (batch, row, vocabulary) -> the row as text.
      train: (corpus, phase, seed, dupe_factor) -> `Lookup` of the phase's training rows.
      heldout: (corpus, seq_len) -> (number of held-out rows, `Lookup` by row index). Evaluation uses rows that are not
        packed, so that metrics do not depend on packing.
      spans_per_row: maximum spans of a row.
      has_pairs: whether spans are sentence pairs with two segments.
    """

    schema: Schema
    make_batch: Callable[[TokenRows, Spans, tf.Tensor, Vocabulary, Masking, int], Batch]
    format_row: Callable[[Mapping[str, np.ndarray], int, Vocabulary], str]
    train: Callable[[Corpus, Phase, int, int], Lookup]
    heldout: Callable[[Corpus, int], tuple[int, Lookup]]
    spans_per_row: int = 1
    has_pairs: bool = False


def make_row_source(pairing: str = "", packed: bool = False, masked: bool = True) -> RowSource:
    """Returns the row source of a pre-training objective.

    `pairing` is a kind of sentence pairs, see `document_pairs`, or "" for rows of running text. Objectives without
    `masked` tokens have no pairs.
    """
    if not masked:
        return RowSource(LANGUAGE_MODEL_BATCH, _unmasked_batch, format_unmasked_row, _train_tiles, _heldout_tiles)
    schema, make_batch = (PACKED_BATCH, _packed_batch) if packed else (MASKED_LM_BATCH, _masked_batch)
    format_row = partial(format_masked_row, LABELS[pairing])
    if not pairing:
        return RowSource(schema, make_batch, format_row, _train_tiles, _heldout_tiles)
    max_pairs = MAX_PAIRS_PER_ROW if packed else 1
    train, heldout = partial(_train_pairs, pairing, max_pairs), partial(_heldout_pairs, pairing)
    return RowSource(schema, make_batch, format_row, train, heldout, max_pairs, has_pairs=True)


def _masked_batch(
    rows: TokenRows, spans: Spans, uniforms: tf.Tensor, vocabulary: Vocabulary, masking: Masking, max_predictions: int
) -> Batch:
    choice, others = tf.split(uniforms, [rows.ids.shape[1], 2 * max_predictions], axis=1)
    positions = choose_positions(rows.ids, rows.lengths, choice, vocabulary, masking, max_predictions)
    return {
        **_unmasked_batch(rows),
        **replace_tokens(rows.ids, positions, others, vocabulary, masking),
        "next_sentence_labels": tf.cast(spans.label, tf.int32),
    }


def _unmasked_batch(rows: TokenRows, *_: object) -> Batch:
    mask = tf.range(tf.shape(rows.ids)[1]) < rows.lengths[:, None]
    return {"input_ids": rows.ids, "input_mask": tf.cast(mask, tf.int32), "segment_ids": rows.segment_ids}


class _RowLayout:
    """Layout of packed rows, which contain one or more pairs, one after the other.

    Most packed rows contain a single pair. Therefore, the first pair of each row is copied as a whole, and only the
    tokens of the row's other pairs are scattered, one by one. `starts`, int32 [N], is the index of each pair's first
    token in its row.
    """

    def __init__(self, slots: tf.Tensor, lengths: tf.Tensor, width: int) -> None:
        """Computes the layout for N padded pairs of `width` elements, of which `lengths`, int32 [N], are used."""
        row, nth = tf.cast(slots // MAX_PAIRS_PER_ROW, tf.int32), tf.math.floormod(slots, MAX_PAIRS_PER_ROW)
        self._first = tf.where(nth == 0)[:, 0]
        before = tf.cumsum(lengths, exclusive=True)
        self.starts = before - tf.gather(tf.gather(before, self._first), row)
        later = tf.where(nth > 0)[:, 0]
        inside = tf.where(tf.range(width) < tf.gather(lengths, later)[:, None])
        pair, offset = tf.gather(later, inside[:, 0]), inside[:, 1]
        # `_pair_indices` and `_row_indices`, both [elements, 2], list the elements of all pairs except each row's first
        # pair: by index in an array of pairs [N, width], and by index in an array of rows [B, width].
        self._pair_indices = tf.stack([pair, offset], axis=1)
        start = tf.cast(tf.gather(self.starts, pair), tf.int64)
        self._row_indices = tf.stack([tf.cast(tf.gather(row, pair), tf.int64), start + offset], axis=1)
        self._row = row

    def join(self, pairs: tf.Tensor) -> tf.Tensor:
        """Packs padded pairs [N, width] into rows [B, width]."""
        return tf.tensor_scatter_nd_update(
            tf.gather(pairs, self._first), self._row_indices, tf.gather_nd(pairs, self._pair_indices)
        )

    def split(self, rows: tf.Tensor) -> tf.Tensor:
        """Splits rows [B, width] into pairs [N, width], with arbitrary values beyond the pairs' lengths."""
        return tf.tensor_scatter_nd_update(
            tf.gather(rows, self._row), self._pair_indices, tf.gather_nd(rows, self._row_indices)
        )


def _packed_batch(
    pairs: TokenRows, spans: Spans, uniforms: tf.Tensor, vocabulary: Vocabulary, masking: Masking, max_predictions: int
) -> Batch:
    seq_len: Any = pairs.ids.shape[1]
    row_predictions = (uniforms.shape[1] - seq_len) // 2
    pair_predictions = max(num_predictions(masking.rate, seq_len, max_predictions))
    choice, others = tf.split(uniforms, [seq_len, 2 * row_predictions], axis=1)
    tokens = _RowLayout(spans.slots, pairs.lengths, seq_len)
    # `choice` has one random number per position of a row. Split it into pairs in the same way as the tokens.
    chosen = choose_positions(pairs.ids, pairs.lengths, tokens.split(choice), vocabulary, masking, pair_predictions)
    used = chosen < seq_len
    in_row = tf.where(used, chosen + tokens.starts[:, None], seq_len)
    unused = tf.fill([tf.shape(chosen)[0], row_predictions - pair_predictions], seq_len)
    predictions = _RowLayout(spans.slots, tf.math.count_nonzero(used, axis=1, dtype=tf.int32), pair_predictions)
    positions = predictions.join(tf.concat([in_row, unused], axis=1))
    is_token = tf.cast(tf.range(seq_len) < pairs.lengths[:, None], tf.int32)
    pair_numbers = tf.cast(tf.math.floormod(spans.slots, MAX_PAIRS_PER_ROW) + 1, tf.int32)
    labels = tf.tensor_scatter_nd_update(
        tf.fill([tf.shape(uniforms)[0] * MAX_PAIRS_PER_ROW], -1), spans.slots[:, None], tf.cast(spans.label, tf.int32)
    )
    return {
        **replace_tokens(tokens.join(pairs.ids), positions, others, vocabulary, masking),
        "segment_ids": tokens.join(pairs.segment_ids),
        "sequence_ids": tokens.join(pair_numbers[:, None] * is_token),
        "position_ids": tokens.join(tf.range(seq_len) * is_token),
        "next_sentence_labels": tf.reshape(labels, [-1, MAX_PAIRS_PER_ROW]),
    }


def _train_pairs(pairing: str, max_pairs: int, corpus: Corpus, phase: Phase, seed: int, dupe_factor: int) -> Lookup:
    index = open_pair_index(corpus, "train", phase.seq_len, seed, dupe_factor, max_pairs, pairing)
    order = epoch_order(index.pass_ends, stream_key(seed, phase.start_step, ORDER))
    pairs_of_rows, spans_of_pairs = packed_pair_lookup(index.runs, max_pairs), pair_lookup(index)

    def lookup(positions: tf.Tensor) -> Spans:
        pairs, slots = pairs_of_rows(order(positions)[0])
        return spans_of_pairs(pairs)._replace(slots=slots)

    return lookup


def _heldout_pairs(pairing: str, corpus: Corpus, seq_len: int) -> tuple[int, Lookup]:
    index = open_pair_index(corpus, "heldout", seq_len, EVAL_SEED, 1, pairing=pairing)
    return len(index.records), pair_lookup(index)


def _train_tiles(corpus: Corpus, phase: Phase, seed: int, dupe_factor: int) -> Lookup:
    order_key, offset_key = (stream_key(seed, phase.start_step, purpose) for purpose in (ORDER, OFFSET))
    count, tile = tile_lookup(len(corpus.train.tokens), phase.seq_len - TILE_SPECIAL_TOKENS, offset_key)
    order = epoch_order(np.array([count]), order_key)
    return lambda positions: tile(*order(positions))


def _heldout_tiles(corpus: Corpus, seq_len: int) -> tuple[int, Lookup]:
    count, tile = tile_lookup(len(corpus.heldout.tokens), seq_len - TILE_SPECIAL_TOKENS, None)
    return count, lambda rows: tile(rows, tf.zeros_like(rows))
