"""Base class of pre-training objectives."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import flax.linen as nn

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.config import Phase, RowFormat
from bertjax.data.schema import Schema
from bertjax.model import flops
from bertjax.model.config import ModelConfig
from bertjax.tasks.objectives.step_cost import StepCost
from bertjax.tasks.task import NumpyBatch, Objective


@dataclasses.dataclass(frozen=True)
class PretrainingObjective(Objective):
    """Base class of pre-training objectives, which define row format, model, loss, metrics and cost.

    `OBJECTIVES` in `tasks/pretraining/config.py` maps names to subclasses. They define `metrics`, `model_class`,
    `denominators` and `compute`. A new head needs a new parameter name, because `--init_from` loads parameters by name.
    """

    packing: bool = False  # whether several sentence pairs or documents share a training row

    model_class: ClassVar[type[nn.Module]]  # class of `model`, a Flax module
    has_masks: ClassVar[bool] = True  # whether tokens are masked
    # Kind of sentence pairs, which need a model with two segments (default: "", no pairs; see `RowFormat`).
    pairing: ClassVar[str] = ""
    # Fields of `PretrainingData`, besides masking options and `packing`, that only this objective uses, such as
    # `generator_size`. The config rejects them for other objectives (default: ()).
    options: ClassVar[tuple[str, ...]] = ()
    # Top-level modules of `model` that exports omit, because they are not trained, or are used only in training
    # (default: ()).
    unexported_modules: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def for_model(cls, config: ModelConfig, data: Any = None) -> Self:
        """Builds the objective for a model config and the run's `PretrainingData` (default: None, its defaults).

        A subclass with `options` overrides this method to pass them on.
        """
        return cls(cls.model_class(config), packing=data is not None and data.packing)

    @property
    def schema(self) -> Schema:
        """Schema of a training batch. `train_dataset` in `data/pretraining/batches.py` describes the arrays."""
        return self.row_format(self.packing).schema

    @classmethod
    def row_format(cls, packing: bool) -> RowFormat:
        """Returns the format of training rows, which the config needs before there is a model."""
        return RowFormat(cls.pairing, packing, cls.has_masks)

    def postprocess_batches(self, batches: Iterator[NumpyBatch]) -> Iterator[NumpyBatch]:
        """Changes batches for the objective, for example sets next-sentence labels to -1 (default: no change)."""
        return batches

    def synthetic_sizes(self, phase: Phase) -> dict[str, int]:
        """Returns `Task.synthetic_sizes` of a phase."""
        config = self.model.config
        return {
            "rows": phase.batch_size,
            "length": phase.seq_len,
            "predictions": phase.row_predictions,
            "sequences": phase.max_sequences_per_row,
            "pieces": config.vocab_size,
            "segments": min(2, max(1, config.type_vocab_size)),
            "labels": 2,
        }

    def baseline(self, corpus: Corpus, batches: Iterator[NumpyBatch]) -> dict[str, float]:
        """Returns the metrics of predictions that ignore the input, for `Task.baseline` (default: {})."""
        return {}

    def flops_per_position(self, phase: Phase) -> float:
        """Returns the FLOPs per position of a training step (default: for a head with vocabulary logits).

        For a head without vocabulary logits, return `bertjax.model.flops.flops_per_position(config, seq_len)` plus
        `TRAINING_FACTOR` times the head's forward FLOPs per position.
        """
        return flops.flops_per_position(self.model.config, phase.seq_len, phase.row_predictions)

    def step_cost(self, phase: Phase, steps: int) -> StepCost:
        """Returns the number of rows, positions and FLOPs of `steps` steps of a phase."""
        rows = steps * phase.batch_size
        positions = rows * phase.seq_len
        attention_flops = positions * flops.attention_flops_per_position(self.model.config, phase.seq_len)
        return StepCost(rows, positions, positions * self.flops_per_position(phase), attention_flops)
