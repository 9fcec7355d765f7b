"""A checkpoint outside of any format: sizes, arrays under our names, vocabulary, and what its output layer tells."""

import dataclasses

import numpy as np

from bertjax.convert.names import CLASSIFIER
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.model.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Portable:
    """A checkpoint outside of any format.

    Attributes:
      model: sizes and settings.
      params: float32 arrays by path, layers stacked, as the models of `bertjax.model.heads` have them. An export takes
        them out one after the other.
      vocabulary: None where the checkpoint has none.
      output: kind of the output layer of a fine-tuned model; "" is the encoder with whatever pre-training heads it has.
      labels: names of classes, labels or tags, in the order of their ids; empty for a regression.
      notes: what is to be told of what was read.
    """

    model: ModelConfig
    params: dict[str, np.ndarray]
    vocabulary: Vocabulary | None
    output: str = ""
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def outputs(self) -> int:
        """How many numbers the output layer gives; 0 where there is none."""
        return self.params[f"{CLASSIFIER}/bias"].shape[0] if self.output else 0

    @property
    def parts(self) -> set[str]:
        """Top-level parameters there are."""
        return {name.partition("/")[0] for name in self.params}
