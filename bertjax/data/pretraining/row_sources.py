"""Sources of batch rows: sentence pairs or documents, single or packed, or consecutive spans of text (tiles).

A span is the location of a sentence pair or a text in the token array of a corpus split.

Sentence pairs: an epoch is one pass of `pairs.document_pairs` over the training documents. Training cycles through
several independent passes. Pairs are truncated to L - 3 tokens. In packed rows, each pair is truncated and masked
independently.

Documents: an epoch is one pass of `pairs.document_pieces` over the training documents, packed like pairs.

Tiles: the rows of an epoch are consecutive spans of L - 2 tokens, so that each token of the split is in exactly one
row. The first span starts at a random offset that changes every epoch. Rows may cross the boundaries of sentences and
documents. In each epoch, one row may be shorter, and one row may wrap around the end of the split.

Axes: B rows, L tokens per row, P predictions per row.
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
    PACKED_BATCH,
    TEXT_SPECIAL_TOKENS,
    Masking,
    Phase,
    max_spans_per_row,
)
from bertjax.data.pretraining.masking import choose_positions, replace_tokens
from bertjax.data.pretraining.pair_index import PairIndex, open_pair_index
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
      format_row: (batch, row, vocabulary) -> the row as text.
      train: (corpus, phase, seed, dupe_factor) -> `Lookup` of the phase's training rows.
      heldout: (corpus, seq_len) -> (number of held-out rows, `Lookup` by row index).
      packed: whether a row contains several spans.
      has_pairs: whether spans are sentence pairs with two segments.
    """

    schema: Schema
    format_row: Callable[[Mapping[str, np.ndarray], int, Vocabulary], str]
    train: Callable[[Corpus, Phase, int, int], Lookup]
    heldout: Callable[[Corpus, int], tuple[int, Lookup]]
    packed: bool = False
    has_pairs: bool = False


def make_row_source(pairing: str = "", packed: bool = False, masked: bool = True) -> RowSource:
    """Returns the row source of a pre-training objective.

    `pairing` is a kind of sentence pairs, see `document_pairs`, or "" for text: documents in rows that are `packed`,
    else running text. Objectives without `masked` tokens have no pairs.
    """
    if not masked:
        return RowSource(LANGUAGE_MODEL_BATCH, format_unmasked_row, _train_tiles, _heldout_tiles)
    schema, format_row = PACKED_BATCH if packed else MASKED_LM_BATCH, partial(format_masked_row, LABELS[pairing])
    if not pairing and not packed:
        return RowSource(schema, format_row, _train_tiles, _heldout_tiles)
    train, heldout = partial(_train_spans, pairing, packed), partial(_heldout_spans, pairing, packed)
    return RowSource(schema, format_row, train, heldout, packed, bool(pairing))


def make_batch(
    source: RowSource, rows: TokenRows, uniforms: tf.Tensor, vocabulary: Vocabulary, masking: Masking, limit: int
) -> Batch:
    """Returns a batch with the arrays of `source.schema`.

    `uniforms` are float32 [B, L + 2 P]. P is the maximum number of predictions per row, and `limit` the maximum per
    span.
    """
    arrays = {
        "input_ids": rows.ids,
        "input_mask": rows.sequence_ids,
        "segment_ids": rows.segment_ids,
        "sequence_ids": rows.sequence_ids,
        "position_ids": rows.position_ids,
        "next_sentence_labels": rows.labels if source.packed else rows.labels[:, 0],
    }
    if source.schema != LANGUAGE_MODEL_BATCH:
        seq_len: Any = rows.ids.shape[1]
        choice, others = tf.split(uniforms, [seq_len, -1], axis=1)
        row_predictions = (uniforms.shape[1] - seq_len) // 2
        positions = choose_positions(rows, choice, vocabulary, masking, limit, row_predictions)
        arrays |= replace_tokens(rows.ids, positions, others, vocabulary, masking)
    return {spec.name: arrays[spec.name] for spec in source.schema}


def _span_lookup(index: PairIndex, spans_per_row: int) -> Lookup:
    pairs_of_rows, spans_of_pairs = packed_pair_lookup(index.runs, spans_per_row), pair_lookup(index)

    def lookup(rows: tf.Tensor) -> Spans:
        pairs, slots = pairs_of_rows(rows)
        return spans_of_pairs(pairs)._replace(slots=slots)

    return lookup


def _train_spans(pairing: str, packed: bool, corpus: Corpus, phase: Phase, seed: int, dupe_factor: int) -> Lookup:
    spans_per_row = max_spans_per_row(phase.seq_len, packed, bool(pairing))
    index = open_pair_index(corpus, "train", phase.seq_len, seed, dupe_factor, spans_per_row, pairing)
    order = epoch_order(index.pass_ends, stream_key(seed, phase.start_step, ORDER))
    spans_of_rows = _span_lookup(index, spans_per_row)
    return lambda positions: spans_of_rows(order(positions)[0])


def _heldout_spans(pairing: str, packed: bool, corpus: Corpus, seq_len: int) -> tuple[int, Lookup]:
    spans_per_row = max_spans_per_row(seq_len, packed, bool(pairing))
    index = open_pair_index(corpus, "heldout", seq_len, EVAL_SEED, 1, spans_per_row, pairing)
    return int(index.pass_ends[-1]), _span_lookup(index, spans_per_row)


def _train_tiles(corpus: Corpus, phase: Phase, seed: int, dupe_factor: int) -> Lookup:
    order_key, offset_key = (stream_key(seed, phase.start_step, purpose) for purpose in (ORDER, OFFSET))
    count, tile = tile_lookup(len(corpus.train.tokens), phase.seq_len - TEXT_SPECIAL_TOKENS, offset_key)
    order = epoch_order(np.array([count]), order_key)
    return lambda positions: tile(*order(positions))


def _heldout_tiles(corpus: Corpus, seq_len: int) -> tuple[int, Lookup]:
    count, tile = tile_lookup(len(corpus.heldout.tokens), seq_len - TEXT_SPECIAL_TOKENS, None)
    return count, lambda rows: tile(rows, tf.zeros_like(rows))
