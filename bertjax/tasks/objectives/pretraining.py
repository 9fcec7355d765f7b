"""Base class of pre-training objectives."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from bertjax.data.pretraining.config import Phase
from bertjax.data.schema import synthetic_batch
from bertjax.model.flops import attention_flops_per_token, flops_per_token
from bertjax.tasks.task import NumpyBatch, Objective, StepCost

if TYPE_CHECKING:
    from bertjax.data.pretraining.source import RowSource
    from bertjax.tasks.pretraining import Config


@dataclasses.dataclass(frozen=True)
class PretrainingObjective(Objective):
    """Rows, loss and metrics of a pre-training run.

    Attributes:
      packing: whether several sentence pairs share a training row.
    """

    packing: bool = False

    # Whether rows contain sentence pairs, which need two segments and can be packed.
    has_pairs: ClassVar[bool] = False

    @classmethod
    def check_config(cls, config: "Config") -> None:
        """Raises a UsageError if the model of `config` cannot be trained with this objective."""

    @classmethod
    def max_predictions(cls, seq_len: int, configured: int, rate: float) -> int:
        """Returns the maximum number of predicted positions of a row.

        Args:
          seq_len: tokens per row.
          configured: value of the field `max_predictions` (0: derived from the rate).
          rate: value of the field `masking.rate`.
        """
        raise NotImplementedError

    def row_source(self) -> "RowSource":
        """Returns the source of training and held-out rows. This imports TensorFlow."""
        raise NotImplementedError

    def prepare(self, batches: Iterator[NumpyBatch]) -> Iterator[NumpyBatch]:
        """Adapts the batches of `row_source` to the objective."""
        return batches

    def synthetic_batch(self, phase: Phase, seed: int = 0) -> dict[str, np.ndarray]:
        """Returns a batch of random rows with the shape of a phase, for benchmarks."""
        config = self.model.config
        return synthetic_batch(
            self.schema,
            phase.batch_size,
            seed,
            length=phase.seq_len,
            predictions=phase.row_predictions,
            pairs=phase.spans_per_row,
            pieces=config.vocab_size,
            segments=min(2, config.type_vocab_size),
            labels=2,
        )

    def step_cost(self, phase: Phase, steps: int) -> StepCost:
        """Returns the cost of the given number of steps of a phase."""
        config, rows = self.model.config, steps * phase.batch_size
        positions = rows * phase.seq_len
        return StepCost(
            rows,
            positions,
            positions * flops_per_token(config, phase.seq_len, phase.max_predictions),
            positions * attention_flops_per_token(config, phase.seq_len),
        )
