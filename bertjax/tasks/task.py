"""Base classes of tasks and objectives."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.run import RunConfig
from bertjax.data.schema import Schema, abstract_batch
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError
from bertjax.metrics.report import ClassReport
from bertjax.tasks.objectives.step_cost import StepCost

Batch = dict[str, jax.Array]
NumpyBatch = dict[str, np.ndarray]
# Metric name -> float32 [2]: a weighted sum over examples or tokens, and the sum of the weights.
MetricSums = dict[str, jax.Array]
# Name -> output of each row of an evaluation batch, [B, ...]; {} if metrics need only the metric sums.
Outputs = dict[str, jax.Array]
# Axis sizes of the dummy batch for `model.init`; parameter shapes do not depend on them.
_INIT_SIZES = {"length": 8, "predictions": 1, "sequences_per_example": 2, "labels": 1, "pairs": 1}


@dataclasses.dataclass(frozen=True)
class Objective:
    """Model, loss and metrics of a train step.

    Objectives are compared by value, so that runs that differ only in data, seed or learning rate share a compiled
    step. A subclass defines `metrics`, `losses`, `schema`, `denominators` and `compute`.

    Attributes:
      model: Flax module that maps a batch to logits.
      splits_into_micro_batches: whether gradient accumulation may split a batch (default: True). Set it to False if the
        loss of a row depends on other rows, as with in-batch negatives.
    """

    model: nn.Module
    splits_into_micro_batches: ClassVar[bool] = True

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics in the metric sums. A run cannot resume with different names.

        The names determine how metrics are used:
          - `loss` is reserved for the sum of all losses.
          - Lower is better for names ending in `loss`, `error` or `entropy`.
          - Curves show names ending in `_loss` or `_accuracy`. Log lines show names that contain `accuracy`.
        """
        raise NotImplementedError

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the metrics whose means add up to the training loss."""
        raise NotImplementedError

    @property
    def schema(self) -> Schema:
        """Specifications of the arrays in a batch."""
        raise NotImplementedError

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the divisor of each loss sum in the training loss.

        Divisors depend only on the global batch, so that the gradients of micro-batches add up to exactly the gradient
        of the batch. Logged means are divided by the sum of weights from `compute`, which is 1e-5 less for masked LM.
        """
        raise NotImplementedError

    def compute(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        """Returns metric sums and per-row outputs of a batch. Dropout is off if `dropout_key` is None."""
        raise NotImplementedError

    def apply(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> Any:
        """Applies the model to a batch. Dropout is off if `dropout_key` is None."""
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        return self.model.apply({"params": params}, batch, deterministic=dropout_key is None, rngs=rngs)

    def init_params(self, key: jax.Array) -> Any:
        """Initializes the parameters, boxed with their logical axes."""
        shapes = abstract_batch(self.schema, 1, **_INIT_SIZES)
        batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        # Kernels reject rows this short, so initialize with XLA attention.
        config = dataclasses.replace(self.model.config, attention="plain")
        return self.model.clone(config=config).init(key, batch)["params"]


class Task:
    """Objective, data and evaluation of a run. Each task module `bertjax/tasks/NAME.py` defines a subclass `Task`.

    By default, the evaluation metrics are the means of the metric sums, and the task writes no predictions.

    Attributes:
      config: configuration of the run.
      objective: loss and metrics of a train step.
      total_steps: optimizer steps of the run.
      warmup_steps: steps of linear learning-rate warm-up.
      eval_every: steps between evaluations (0: no evaluation). The last step is evaluated too.
      patience: number of evaluations without a better `best_metric` after which a run stops (default: 0, no limit).
      checkpoint_every: steps between checkpoints. The last step is always saved.
      eval_first: whether to evaluate before the first step too.
      batch_sizes: numbers of rows of the global batches. Each must be divisible by the number of data shards.
      phase_steps: number of steps of each training phase. All batches of a phase have the same shape.
      has_schedule: whether `total_steps` and `warmup_steps` are known (default: True). If not, they depend on data that
        the config does not name, and have arbitrary values.
      steps_per_epoch: steps of an epoch (default: 0, the task has no epochs).
      num_eval_batches: number of batches of an evaluation (default: 0, unknown).
      best_metric: evaluation metric that selects the best checkpoint (default: "", use the newest checkpoint).
      unlabeled_source: source of the evaluation data if it lacks labels (default: "", it contains labels).
      reinit_params: top-level parameters that are restored from `--init_from` only if its output layer has the same
        labels.
      can_add_pieces: whether a run can start from a checkpoint whose vocabulary is the beginning of the data's.
      other_tasks: tasks by name that are evaluated with the same parameters. Their metrics get the name as prefix.
      workdir_files: content by name of files to store in the workdir, so that checkpoints can be used without the data.
      results: entries about the data for `results.json`.
      notes: log lines about the data.
      data_hash: SHA-256 of the data (default: "", no data). A run cannot resume if the data at the same path changed.
      has_class_reports: whether `class_reports` returns reports.
      features_fingerprint: fingerprint of the checkpoint that computed the batches' cached features (default: "", no
        cached features).
    """

    phase_steps: tuple[int, ...] = ()
    has_schedule = True
    steps_per_epoch = 0
    num_eval_batches = 0
    eval_first = False
    patience = 0
    best_metric = ""
    unlabeled_source = ""
    reinit_params: tuple[str, ...] = ()
    can_add_pieces = False
    notes: tuple[str, ...] = ()
    data_hash = ""
    features_fingerprint = ""
    has_class_reports = False

    objective: Objective
    total_steps: int
    warmup_steps: int
    eval_every: int
    checkpoint_every: int
    batch_sizes: tuple[int, ...]

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.workdir_files: dict[str, bytes] = {}
        self.results: dict[str, Any] = {}
        self.other_tasks: dict[str, Task] = {}

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields the shard's rows of each training batch, starting at `start_step`."""
        raise UsageError("the task was built without training data; use the command `train`")

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields the shard's rows of the evaluation batches. Each example occurs once. Padding rows have weight 0."""
        raise UsageError("the task has no evaluation data; set a corpus or a folder in config.data")

    def cost_before(self, step: int) -> StepCost:
        """Returns the cost of all steps before `step`."""
        raise NotImplementedError

    def synthetic_batch(self, phase: int = 0) -> NumpyBatch:
        """Returns a batch for benchmarks, with the batch shape of a training phase. The data is random or typical."""
        raise NotImplementedError

    def typical_step(self) -> int:
        """Returns a step whose batch has the shape of `synthetic_batch(0)`."""
        return 0

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        """Formats a row of a batch as text."""
        return str({name: values[row] for name, values in batch.items()})

    def evaluate(self, means: dict[str, float], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Returns all metrics of an evaluation.

        Args:
          means: mean of each metric over the evaluation data, computed from the metric sums.
          outputs: outputs of each evaluation batch, in order.
        """
        return means

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of a simple baseline without a model (default: {}, no baseline)."""
        return {}

    def check_data(self, wait: bool) -> None:
        """Raises a BertjaxError if a damaged data file was found. With `wait`, verifies all files first."""

    def class_reports(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
        """Returns precision and recall of each class, by evaluation-set suffix (default: {}, no classes)."""
        return {}

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes predictions in the official format and returns the files."""
        raise NotImplementedError

    @property
    def writes_predictions(self) -> bool:
        """True if the subclass defines `write_predictions`."""
        return type(self).write_predictions is not Task.write_predictions
