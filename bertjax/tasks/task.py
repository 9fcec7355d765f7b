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
# Per-row outputs of an evaluation batch, name -> [B, ...]; {} if the metric sums are all that is needed.
Outputs = dict[str, jax.Array]
# Axis sizes of the dummy batch for `model.init`; parameter shapes do not depend on them.
_INIT_SIZES = {"length": 8, "predictions": 1, "sequences_per_example": 2, "labels": 1, "pairs": 1}


@dataclasses.dataclass(frozen=True)
class Objective:
    """Model, loss and metrics of a step.

    Equal by value, so that runs that differ only in data, seed or learning rate share one compiled step. A subclass
    defines `metrics`, `losses`, `schema`, `denominators` and `compute`.

    Attributes:
      model: Flax module that maps a batch to logits.
      splits_into_micro_batches: False if the loss of a row depends on other rows, as with in-batch negatives.
    """

    model: nn.Module
    splits_into_micro_batches: ClassVar[bool] = True

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of all entries of the metric sums. A run cannot resume with different ones.

        Names have a meaning:
          - `loss` is reserved for the sum of all losses.
          - Lower is better for names ending in `loss`, `error` or `entropy`.
          - Curves show names ending in `_loss` or `_accuracy`; log lines show names that contain `accuracy`.
        """
        raise NotImplementedError

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the metrics whose means add up to the training loss."""
        raise NotImplementedError

    @property
    def schema(self) -> Schema:
        """Arrays of a batch."""
        raise NotImplementedError

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the value by which the sum of each loss is divided in the training loss.

        It depends on the global batch alone, so that gradients of micro-batches add up to exactly the gradient of the
        batch. Logged means divide by the weights of `compute` instead; for masked LM the two differ by 1e-5.
        """
        raise NotImplementedError

    def compute(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        """Returns metric sums and per-row outputs of a batch; without a key, dropout is off."""
        raise NotImplementedError

    def apply(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> Any:
        """Applies the model to a batch; without a key, dropout is off."""
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
    """An objective with its data and metrics; a subclass lives in `bertjax/tasks/NAME.py` as `Task`.

    The defaults fit a task that is evaluated by its metric sums alone and writes no predictions.

    Attributes:
      config: configuration of the run.
      objective: what a step computes.
      total_steps: optimizer steps of the run.
      warmup_steps: steps of linear learning-rate warm-up.
      eval_every: steps between evaluations (0: no evaluation); the last step is always evaluated.
      patience: evaluations without improvement of `best_metric` after which a run stops (default: 0, no limit).
      checkpoint_every: steps between checkpoints; the last step is always saved.
      eval_first: evaluate before the first step, too.
      batch_sizes: rows of the global batches; each must split over the data shards.
      phase_steps: steps of each phase, within which all batches have one shape.
      num_eval_batches: batches of an evaluation (0: unknown).
      best_metric: evaluation metric that selects the best checkpoint (default: "", the newest is kept).
      unlabeled_source: name of the evaluation data if it has no labels.
      reinit_params: top-level parameters that are never restored from `--init_from`.
      workdir_files: content of the files that the workdir keeps, so that its checkpoints work without the data.
      results: entries for `results.json` about the data.
      notes: lines about the data for the log.
      data_hash: SHA-256 of the data ("": no data), so that no run resumes on other data at the same path.
      has_class_reports: `class_reports` returns reports.
      features_fingerprint: fingerprint of the checkpoint whose hidden states the batches hold ("": none).
    """

    phase_steps: tuple[int, ...] = ()
    num_eval_batches = 0
    eval_first = False
    patience = 0
    best_metric = ""
    unlabeled_source = ""
    reinit_params: tuple[str, ...] = ()
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

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields the shard's rows of the batch of `start_step` and of all later steps."""
        raise UsageError("the task was built without training data; use the command `train`")

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields the shard's rows of the evaluation batches: every example exactly once, padding rows have weight 0."""
        raise UsageError("the task has no evaluation data; name some in config.data")

    def cost_before(self, step: int) -> StepCost:
        """Returns the cost of all steps before `step`."""
        raise NotImplementedError

    def synthetic_batch(self, phase: int = 0) -> NumpyBatch:
        """Returns a batch for benchmarks with the shape of a phase's batches: random, or typical data."""
        raise NotImplementedError

    def typical_step(self) -> int:
        """Returns a step whose batch has the shape of `synthetic_batch(0)`."""
        return 0

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        """Formats a row as text."""
        return str({name: values[row] for name, values in batch.items()})

    def evaluate(self, means: dict[str, float], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Returns all metrics of an evaluation.

        Args:
          means: means of the metric sums.
          outputs: outputs of the evaluation batches, in order.
        """
        return means

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of the best guess that does not look at the input."""
        return {}

    def check_data(self, wait: bool) -> None:
        """Raises a BertjaxError if data that was verified so far is damaged; with `wait`, verifies all data first."""

    def class_reports(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
        """Returns precision and recall of each class, by the suffix of the evaluation set ({}: no classes)."""
        return {}

    def write_predictions(self, outputs: list[dict[str, np.ndarray]], folder: Path) -> list[Path]:
        """Writes predictions in the official format and returns the files."""
        raise NotImplementedError

    @property
    def writes_predictions(self) -> bool:
        """True if the subclass defines `write_predictions`."""
        return type(self).write_predictions is not Task.write_predictions
