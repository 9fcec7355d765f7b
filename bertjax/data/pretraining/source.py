"""Where the rows of an objective come from: which spans of the corpus, in which order."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from bertjax.corpus.store import Corpus
from bertjax.data.pretraining.rows import Spans
from bertjax.data.pretraining.settings import Phase

# Of held-out rows, which are the same for every run.
EVAL_SEED = 0
# What a stream of random numbers is for, so that no two share a key.
ORDER, OFFSET, MASKS, CUTS = range(4)
# A function of positions of a phase, int64 [B], to (row of an epoch, its span of the training tokens).
Lookup = Callable[[tf.Tensor], tuple[tf.Tensor, Spans]]


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Where rows come from.

    Attributes:
      is_paired: rows have two segments.
      train: (corpus, phase, seed, different passes, whether to shuffle) to the training rows of a phase.
      heldout: (corpus, tokens a row) to the number of held-out rows, and a function of them to their spans.
      train_plan: (corpus, tokens a row, seed, different passes) to the file that rows are read from, by `train`'s rows;
        None where they are computed.
      verify_heldout: (corpus, tokens a row): holds what held-out rows were read from, besides tokens, against its
        checksums.
    """

    is_paired: bool
    train: Callable[[Corpus, Phase, int, int, bool], Lookup]
    heldout: Callable[[Corpus, int], tuple[int, Callable[[tf.Tensor], Spans]]]
    train_plan: Callable[[Corpus, int, int, int], Path | None]
    verify_heldout: Callable[[Corpus, int], None]
