"""Settings that every fine-tuning run has (section A.3 of the paper)."""

import dataclasses
import json
import math
from typing import Any, ClassVar

from bertjax.config.fields import at_least, limited, one_of
from bertjax.config.optimizer import OptimizerConfig
from bertjax.config.run import RunConfig
from bertjax.data.finetuning.examples import Batching
from bertjax.errors import UsageError
from bertjax.model.architecture import ARCHITECTURE_FIELDS, LSTM
from bertjax.model.config import ModelConfig
from bertjax.model.feature_head import ENCODER, FeatureHead

# What a task's files may have, and `predict` takes; or nothing is evaluated.
SPLITS, NONE = ("dev", "test"), "none"
BALANCED = "balanced"


def checkpoint_model() -> dict[str, Any]:
    """Fields of a model whose architecture is that of the checkpoint a run starts from: 0 and empty."""
    fields = dataclasses.asdict(ModelConfig())
    return {name: type(value)() if name in ARCHITECTURE_FIELDS else value for name, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class FinetuningData:
    """What is read, and in which batches; each task adds its own.

    Attributes:
      path: folder of the task's files.
      eval_split: `dev`, `test`, or `none`, which keeps the last checkpoint.
      train_share: share of the training rows to learn from, the same ones for every seed.
      dev_share: share of the training rows (documents, passages) that is cut off as the dev set; 0 takes the dev file.
      dev_seed: which ones; not `seed`, so that runs of several seeds have one dev set.
      class_weights: `balanced`, or JSON such as '{"rare": 5}', in training; empty is 1 for each class.
      vocabulary: a file; empty is the checkpoint's.
      labels: an output_layer.json; empty takes the labels of the training file.
      seq_len: tokens a row at most, special tokens included.
      batch_size: examples of the global batch.
      eval_batch_size: the same, of an evaluation.
      bucket: rows are padded to a multiple of so many tokens; 0 is to `seq_len`.
      examples_per_row: so many at most share a training row, each with positions and attention of its own, where they
        are short; a batch has the same examples, in fewer rows. It divides `batch_size`; not for SQuAD and SWAG.
    """

    path: str = ""
    eval_split: str = "dev"
    train_share: float = 1.0
    dev_share: float = 0.0
    dev_seed: int = limited(0, 2**32 - 1)
    class_weights: str = ""
    vocabulary: str = ""
    labels: str = ""
    seq_len: int = 128
    batch_size: int = limited(32, 1 << 20)
    eval_batch_size: int = limited(64, 1 << 20)
    bucket: int = 32
    examples_per_row: int = 1

    def __post_init__(self) -> None:
        at_least(self, "config.data", batch_size=1, eval_batch_size=1, dev_seed=0)
        one_of(self, "config.data", eval_split=(*SPLITS, NONE))
        Batching(self.batch_size, self.bucket, self.seq_len, self.examples_per_row)
        if not 0 < self.train_share <= 1:
            raise UsageError(f"config.data.train_share is {self.train_share}; it must be above 0 and at most 1")
        if not 0 <= self.dev_share < 1:
            raise UsageError(f"config.data.dev_share is {self.dev_share}; it must be at least 0 (none) and below 1")
        if self.dev_seed and not self.dev_share:
            raise UsageError(f"config.data.dev_seed is {self.dev_seed}, and config.data.dev_share cuts off nothing")
        if self.dev_share and self.eval_split == NONE:
            raise UsageError(
                f"config.data.dev_share is {self.dev_share}, and config.data.eval_split=none evaluates nothing"
            )
        _ = self.weights_of_classes

    @property
    def weights_of_classes(self) -> dict[str, float] | str:
        """Class to weight, or BALANCED."""
        text = self.class_weights
        if text in ("", BALANCED):
            return text or {}
        try:
            given = json.loads(text)
            if not isinstance(given, dict):
                raise ValueError
            if not all(type(value) in (int, float) and 0 < value < math.inf for value in given.values()):
                raise ValueError
        except (ValueError, RecursionError):
            raise UsageError(
                f"config.data.class_weights is {text[:100]!r}; give {BALANCED}, or a weight above 0 for the classes "
                """that have not 1, as JSON: '{"rare": 5, "usual": 0.5}'"""
            ) from None
        return given


@dataclasses.dataclass(frozen=True)
class FinetuningConfig(RunConfig):
    """What every fine-tuning run has.

    Attributes:
      steps: updates of the whole run; 0 is `epochs`.
      epochs: passes over the training rows.
      eval_every: steps between two evaluations; 0 is once an epoch.
      checkpoint_every: steps between two checkpoints; 0 is once an epoch. One better than all before is always saved.
      keep_checkpoints: as of pre-training, besides the best one.
      select_by: evaluation metric by which the best checkpoint is kept; empty is the task's own.
      patience: evaluations without a better one after which the run ends; 0 never ends it.
      label_smoothing: share of a label's probability that is spread over all classes, in training.
      feature_head: what is between the encoder and the task's own layer.
      model: fields of `ModelConfig`; an architecture of 0 and empty fields is that of the checkpoint it starts from.

    Raises:
      UsageError: no run can start with a value; names the field.
    """

    zero_allowed: ClassVar[tuple[str, ...]] = ("steps", "eval_every", "checkpoint_every")
    # -1: a tenth of all steps, as in google-research/bert.
    least_warmup: ClassVar[int] = -1

    steps: int = 0
    epochs: int = 3
    log_every: int = 50
    eval_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 1
    select_by: str = ""
    patience: int = 0
    label_smoothing: float = 0.0
    feature_head: FeatureHead = FeatureHead()
    model: dict[str, Any] = dataclasses.field(default_factory=checkpoint_model)
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5, warmup_steps=-1)
    data: FinetuningData = FinetuningData()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps == 0 and self.epochs < 1:
            raise UsageError(f"config.epochs is {self.epochs}; it must be at least 1, or config.steps given")
        self.check_batch(self.data.batch_size, self.data.seq_len)
        at_least(self, "config", patience=0)
        if self.feature_head.features and ENCODER not in self.optimizer.freeze:
            raise UsageError(
                f"config.feature_head.features is {self.feature_head.features}, of an encoder that is not trained; give "
                f"--config.optimizer.freeze={ENCODER} too"
            )
        if not 0 <= self.label_smoothing < 1:
            raise UsageError(f"config.label_smoothing is {self.label_smoothing}; it must be at least 0 and below 1")
        if shared := self.data.examples_per_row > 1:
            self.check_batch(self.data.batch_size // self.data.examples_per_row, self.data.seq_len)
            if self.feature_head.is_there or self.model["encoder"] == LSTM:
                raise UsageError(
                    f"config.data.examples_per_row is {self.data.examples_per_row}, and what reads a row word by word "
                    "(config.feature_head, config.model.encoder=lstm) takes one; leave it out"
                )
        if self.model["hidden_size"]:
            self.check_rows(self.data.seq_len, shared)
            self.model_config(self.model["vocab_size"] or 1)

    def refuse(self, why: str, *names: str) -> None:
        """Refuses settings that a task does nothing with.

        Args:
          why: what the task has instead, for the user.
          names: of those of `label_smoothing`, `data.class_weights` and `data.examples_per_row` that make no sense.

        Raises:
          UsageError: one of them is given.
        """
        given = {
            "label_smoothing": (self.label_smoothing, 0.0),
            "data.class_weights": (self.data.class_weights, ""),
            "data.examples_per_row": (self.data.examples_per_row, 1),
        }
        for name in names:
            value, usual = given[name]
            if value != usual:
                raise UsageError(f"config.{name} is {value!r}, and {why}; leave it out")

    @property
    def has_data(self) -> bool:
        """Whether they name data; without any, a task has synthetic batches only."""
        return bool(self.data.path)
