"""Config fields of all fine-tuning tasks (section A.3 of the paper)."""

import contextlib
import dataclasses
import json
import math
import operator
from typing import Literal

from bertjax.config.optimizer import OptimizerConfig
from bertjax.config.run import DATA_FILES, RunConfig, set_paths
from bertjax.errors import UsageError
from bertjax.model.config import LSTM, UNSET_ARCHITECTURE, ModelConfig
from bertjax.model.encoder import ENCODER
from bertjax.model.feature_head import FeatureHead
from bertjax.tasks.objectives.classification import BALANCED
from bertjax.utils.sections import Section, bounded

# Values of `config.data.eval_split`. NO_SPLIT turns evaluation off.
SPLITS, NO_SPLIT = ("dev", "test"), "none"


@dataclasses.dataclass(frozen=True)
class FinetuningData(Section, prefix="config.data."):
    """Data and batches of a fine-tuning run. Each task adds its own fields.

    Attributes:
      path: folder of the task's files.
      eval_split: split to evaluate: `dev`, `test` or `none` (no evaluation; the last checkpoint is kept).
      train_share: fraction of the training rows to train on. The selection does not depend on `seed`.
      dev_share: fraction of the training rows, documents or questions to hold out as dev set (default: 0, use the dev
        file).
      dev_seed: random seed that selects the held-out rows. It is separate from `seed`, so that runs with different
        seeds share a dev set.
      class_weights: class weights of the training loss, `balanced` or JSON such as '{"rare": 5}' (default: 1 each).
      vocabulary: vocabulary file (default: the vocabulary of the checkpoint).
      labels: path of an `output_layer.json` with the labels (default: the labels of the training file).
      seq_len: maximum tokens per row, including special tokens.
      batch_size: examples per global batch.
      eval_batch_size: examples per evaluation batch.
      bucket: rows are padded to a multiple of this number of tokens (default: 32; 0 pads to `seq_len`).
      examples_per_row: maximum examples packed into a training row (default: 1, no packing). It must divide
        `batch_size`. Each example has its own positions and attends only to itself. Not supported by SQuAD and SWAG.
    """

    path: str = ""
    eval_split: str = bounded("dev", choices=(*SPLITS, NO_SPLIT))
    train_share: float = bounded(1.0, above=0, at_most=1)
    dev_share: float = bounded(0.0, at_least=0, below=1)
    dev_seed: int = bounded(0, at_least=0, at_most=2**32 - 1)
    class_weights: str = ""
    vocabulary: str = ""
    labels: str = ""
    seq_len: int = bounded(128, at_least=8)
    batch_size: int = bounded(32, at_least=1, at_most=1 << 20)
    eval_batch_size: int = bounded(64, at_least=1, at_most=1 << 20)
    bucket: int = bounded(32, at_least=0)
    examples_per_row: int = bounded(1, at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size % self.examples_per_row:
            raise UsageError(
                f"config.data.examples_per_row is {self.examples_per_row}; it must divide "
                f"config.data.batch_size={self.batch_size}"
            )
        if self.dev_share and self.eval_split == NO_SPLIT:
            raise UsageError(f"config.data.dev_share={self.dev_share} has no effect with config.data.eval_split=none")
        _ = self.class_weight_map

    @property
    def class_weight_map(self) -> dict[str, float] | Literal["balanced"]:
        """Class weights, keyed by class name, or "balanced". Empty if `class_weights` is unset."""
        if self.class_weights == BALANCED:
            return BALANCED
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            weights = json.loads(self.class_weights or "{}")
            if all(type(value) in (int, float) and 0 < value < math.inf for value in weights.values()):
                return weights
        raise UsageError(
            f"config.data.class_weights={self.class_weights[:100]!r} is not valid; use {BALANCED}, or JSON with a "
            """positive weight by class name, such as '{"rare": 5, "usual": 0.5}'"""
        )

    @property
    def has_files(self) -> bool:
        """True if a folder or a file of the data is set."""
        return bool(self.path or set_paths(self, DATA_FILES))


@dataclasses.dataclass(frozen=True)
class FinetuningConfig(RunConfig):
    """Config for a fine-tuning run.

    Attributes:
      steps: optimizer steps of the run (default: 0, use `epochs`).
      epochs: number of passes over the training rows.
      eval_every: steps between evaluations (default: 0, once per epoch).
      checkpoint_every: steps between checkpoints (default: 0, once per epoch). The best checkpoint is always saved.
      keep_checkpoints: number of newest checkpoints to keep, in addition to the best checkpoint.
      select_by: evaluation metric that selects the best checkpoint (default: the task's main metric).
      patience: number of evaluations without improvement after which the run stops (default: 0, never).
      label_smoothing: fraction of a label's probability that is spread over all classes in training.
      feature_head: layers between encoder and output layer.
      data: data and batches of the task.
    """

    steps: int = bounded(0, at_least=0)
    epochs: int = 3
    log_every: int = bounded(50, at_least=1)
    eval_every: int = bounded(0, at_least=0)
    checkpoint_every: int = bounded(0, at_least=0)
    keep_checkpoints: int = bounded(1, at_least=1)
    select_by: str = ""
    patience: int = bounded(0, at_least=0)
    label_smoothing: float = bounded(0.0, at_least=0, below=1)
    feature_head: FeatureHead = FeatureHead()
    model: ModelConfig = UNSET_ARCHITECTURE
    # `warmup_steps=-1` is a tenth of the steps, as in google-research/bert.
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5, warmup_steps=-1)
    data: FinetuningData = FinetuningData()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps == 0 and self.epochs < 1:
            raise UsageError(f"config.epochs={self.epochs} is out of range; use at least 1, or set config.steps")
        if self.feature_head.features and ENCODER not in self.optimizer.freeze:
            raise UsageError(
                f"config.feature_head.features needs a frozen encoder; add --config.optimizer.freeze={ENCODER}"
            )
        self.check_micro_batches(self.data.batch_size // self.data.examples_per_row)
        packed = self.data.examples_per_row > 1
        if packed and (self.feature_head.is_used or self.model.encoder == LSTM):
            raise UsageError("config.data.examples_per_row is not supported with LSTMs or a feature head; use 1")
        if self.has_model:  # Otherwise, the architecture comes from `--init_from` and is unknown here.
            self.check_rows(self.data.seq_len, packed)

    def reject(self, reason: str, *fields: str) -> None:
        """Raises a UsageError if one of `fields` is set. `reason` states why the fields have no effect on the task."""
        for field in fields:
            value, default = (operator.attrgetter(field)(config) for config in (self, FinetuningConfig()))
            if value != default:
                raise UsageError(f"config.{field}={value!r} has no effect: {reason}; leave it unset")
