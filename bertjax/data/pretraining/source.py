"""What an objective is to the data: where its rows come from, and what is to be predicted of them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.corpus.tokenizer import Vocabulary
from bertjax.data.pretraining.assembly import Assembled
from bertjax.data.pretraining.config import Masking, Phase
from bertjax.data.pretraining.rows import Spans
from bertjax.data.schema import Schema

# Of held-out rows, which are the same for every run.
EVAL_SEED = 0
# What a stream of random numbers is for. Keys are told apart without zeros at their end.
ORDER, OFFSET, MASKS, CUTS = range(4)
# A function of positions of a phase, int64 [B], to (which span of the epochs each is, the spans of training tokens).
Lookup = Callable[[tf.Tensor], tuple[tf.Tensor, Spans]]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is to be predicted of rows.

    Attributes:
      schema: of a batch.
      uniforms: (masking, tokens a row, predictions a span) to how many random numbers a row takes.
      maker: (vocabulary, masking, tokens a row, predictions a span) to a function of (spans as rows of their own, the
        spans, uniforms float32 [B, uniforms]) to a batch.
    """

    schema: Schema
    uniforms: Callable[[Masking, int, int], int]
    maker: Callable[[Vocabulary, Masking, int, int], Callable[[Assembled, Spans, tf.Tensor], dict[str, tf.Tensor]]]


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Where rows come from.

    Attributes:
      prediction: what is to be predicted of them.
      spans_a_row: at most.
      is_paired: spans have two segments.
      train: (corpus, phase, seed, different passes, whether to shuffle) to the training rows of a phase.
      heldout: (corpus, tokens a row) to the number of held-out rows, and a function of them to their spans.
      train_plan: (corpus, tokens a row, seed, different passes) to the file that spans are read from, by `train`'s
        spans; None where they are computed.
      verify_heldout: (corpus, tokens a row): holds what held-out rows were read from, besides tokens, against its
        checksums.
      heldout_like: the source whose held-out rows these are, if not this one: rows that are packed for training are not
        for evaluation, so that what is measured stays what it is.
    """

    prediction: Prediction
    spans_a_row: int
    is_paired: bool
    train: Callable[[Corpus, Phase, int, int, bool], Lookup]
    heldout: Callable[[Corpus, int], tuple[int, Callable[[tf.Tensor], Spans]]]
    train_plan: Callable[[Corpus, int, int, int], Path | None]
    verify_heldout: Callable[[Corpus, int], None]
    heldout_like: "RowSource | None" = None
