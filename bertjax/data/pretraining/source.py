"""Interface between pre-training objectives and data: sources of rows, and the formats of batches.

A span is the location of a sentence pair or a text in the token array of a corpus split.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.pretraining.assembly import TokenRows
from bertjax.data.pretraining.config import Masking, Phase
from bertjax.data.pretraining.rows import Spans
from bertjax.data.schema import Schema

# Seed of the held-out rows, which are the same for all runs.
EVAL_SEED = 0
# Purposes of random streams, used as the last part of a `stream_key`.
ORDER, OFFSET, MASKS, CUTS = range(4)
NumpyBatch = Mapping[str, np.ndarray]
# Maps row positions within a phase, int64 [B], to (indices of the spans, spans).
Lookup = Callable[[tf.Tensor], tuple[tf.Tensor, Spans]]


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Conversion of token rows to batches, and of batch rows to text.

    Attributes:
      schema: schema of a batch.
      num_uniforms: (masking, seq_len, max_predictions) -> number of random numbers per row.
      make_batch_function: (vocabulary, masking, seq_len, max_predictions) -> function from (token rows, spans,
        uniforms float32 [B, num_uniforms]) to a batch.
      format_row: (batch, row, vocabulary) -> the row as text.
    """

    schema: Schema
    num_uniforms: Callable[[Masking, int, int], int]
    make_batch_function: Callable[
        [Vocabulary, Masking, int, int], Callable[[TokenRows, Spans, tf.Tensor], dict[str, tf.Tensor]]
    ]
    format_row: Callable[[NumpyBatch, int, Vocabulary], str]


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Source of training and held-out rows.

    Attributes:
      row_format: format of the rows.
      spans_per_row: maximum spans of a row.
      has_pairs: whether spans are sentence pairs with two segments.
      train: (corpus, phase, seed, passes, shuffle) -> `Lookup` of the training rows of a phase.
      heldout: (corpus, seq_len) -> (number of held-out rows, function from row indices to spans).
      heldout_source: source of the held-out rows (default: None, this source). Packed sources use unpacked rows for
        evaluation, so that metrics are comparable.
    """

    row_format: RowFormat
    spans_per_row: int
    has_pairs: bool
    train: Callable[[Corpus, Phase, int, int, bool], Lookup]
    heldout: Callable[[Corpus, int], tuple[int, Callable[[tf.Tensor], Spans]]]
    heldout_source: "RowSource | None" = None
