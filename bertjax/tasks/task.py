"""Base classes of tasks and objectives."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.config.run import RunConfig
from bertjax.data.schema import Schema
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError
from bertjax.metrics.metric import Metric
from bertjax.metrics.report import ClassReport
from bertjax.tasks.finetuning.output_layer import OutputLayer
from bertjax.tasks.objectives.step_cost import StepCost

Batch = dict[str, jax.Array]
NumpyBatch = dict[str, np.ndarray]
# Maps the name of each metric to a float32 array [2]: a weighted sum over examples or tokens, and the sum of the
# weights.
MetricSums = dict[str, jax.Array]
# Maps names to outputs of an evaluation batch, [B, ...]. Empty if all metrics are computed from metric sums.
Outputs = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """Model, loss and metrics of a train step.

    The training loss is the sum of `loss_weights[name] * sums[name][0] / denominators[name]` over the losses, where
    `sums` are the metric sums of `compute`. A denominator is usually the sum of the weights in the whole batch
    (`sums[name][1]` covers only a micro-batch), and must be positive even if this sum is 0. Logged metrics are weighted
    means over all steps since the last log line.

    Objectives are compared by value, because compiled steps are cached by objective: runs that differ only in data,
    seed or learning rate share a step. A subclass defines `metrics`, `schema`, `denominators` and `compute`.

    Attributes:
      model: Flax module that is applied to a batch. Its field `config` is a `ModelConfig`.
      metrics: metrics that `compute` returns.
      schema: specifications of the arrays in a training batch. Evaluation batches may have other arrays.
      splits_into_micro_batches: whether gradient accumulation may split a batch into micro-batches, which are processed
        one after the other (default: True). Set it to False if the loss of a row depends on other rows, as with
        in-batch negatives.
      can_add_pieces: whether the data's vocabulary may have pieces that the vocabulary of an `--init_from` checkpoint
        lacks (default: False).
      untrained_modules: top-level modules of `model` that the loss does not depend on (default: ()).
    """

    model: nn.Module
    splits_into_micro_batches: ClassVar[bool] = True
    can_add_pieces: ClassVar[bool] = False
    untrained_modules: ClassVar[tuple[str, ...]] = ()

    # Subclasses override these properties, or replace them by class attributes. Annotate such attributes only with
    # `ClassVar`, because other annotated attributes are dataclass fields.
    @property
    def metrics(self) -> tuple[Metric, ...]:
        raise NotImplementedError

    @property
    def schema(self) -> Schema:
        raise NotImplementedError

    @property
    def loss_weights(self) -> dict[str, float]:
        """Coefficient of each loss in the training loss, keyed by metric name (default: 1 each)."""
        return {metric.name: 1.0 for metric in self.metrics if metric.is_loss}

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the divisor of each loss, by metric name, such as the number of predicted tokens.

        Divisors are computed from the whole batch, so that the gradients of micro-batches add up to its gradient.
        """
        raise NotImplementedError

    def compute(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        """Returns metric sums and per-row outputs of a batch. `dropout_key` is None in evaluation: no dropout."""
        raise NotImplementedError

    def apply(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> Any:
        """Applies the model to a batch. Dropout is off if `dropout_key` is None."""
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        return self.model.apply({"params": params}, batch, deterministic=dropout_key is None, rngs=rngs)

    def init_params(self, key: jax.Array) -> Any:
        """Initializes the parameters, boxed with their logical axes."""
        # The dummy batch has one row (`spec.axes` omits the row axis) of 8 positions, because LSTMs need at least two.
        # Parameter shapes do not depend on these sizes.
        batch = {
            spec.name: jnp.zeros((1, *(8 if axis == "length" else 1 for axis in spec.axes)), spec.dtype)
            for spec in self.schema
        }
        # Attention kernels reject rows this short, so initialize with XLA attention.
        config = dataclasses.replace(self.model.config, attention="xla")
        return self.model.clone(config=config).init(key, batch)["params"]


class Task:
    """Objective, data, schedule and evaluation of a run.

    A subclass sets the attributes that have no default, and overrides `train_batches`, `eval_batches`,
    `unfrozen_cost_before` and `synthetic_sizes`.

    Step s, counted from 0, performs update s + 1. The step of a log line or checkpoint is the number of updates so far.
    """

    # Objective and schedule

    objective: Objective
    total_steps: int
    warmup_steps: int  # steps of linear learning-rate warm-up
    # Row counts that must be divisible by data shards times micro-batches, such as the batch size of each phase
    # (default: (), no training data). The row counts of all arrays in a batch are multiples of these.
    batch_sizes: tuple[int, ...] = ()
    steps_per_epoch = 0  # 0: the task has no epochs
    checkpoint_every: int  # steps between checkpoints, at least 1; the last step is always saved

    # Evaluation

    eval_batch_size: int  # rows of the global evaluation batch, a multiple of the number of data shards
    eval_every: int  # steps between evaluations (0: none); otherwise, the last step is also evaluated
    eval_first = False  # whether to evaluate before the first step as well
    best_metric: Metric | None = None  # evaluation metric that selects the best checkpoint (None: use the newest one)

    # Parameters and data

    # Top-level parameter names of the output layer, and of the layers between encoder and output layer (feature head).
    # With `--init_from`, they are loaded only if the checkpoint has the same output layer. Default: (), as in
    # pre-training.
    output_params: tuple[str, ...] = ()
    data_hash = ""  # SHA-256 of the data (default: "", no data); a run can resume only with the same hash
    notes: tuple[str, ...] = ()  # log lines about the data

    # Used by only some tasks or commands

    # Whether `total_steps` and `warmup_steps` are known. They are placeholders if the task was built without data, for
    # `bertjax describe` and `bertjax plan`.
    has_schedule = True
    num_eval_batches = 0  # batches per evaluation, for the progress bar (0: unknown); `eval_batches` may set it
    labels: Sequence[str] = ()  # names of the classes or tags by id, for `class_reports`
    accepts_any_encoder = False  # whether `evaluate` accepts checkpoints of other tasks
    evaluation_problem = ""  # error message of `train` and `evaluate` if the evaluation data cannot be used
    # Whether the inputs of the head are features of the frozen encoder, which can be computed once before training.
    uses_frozen_features = False

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        # Files to store in the workdir (content by name), so that checkpoints can be used without the data.
        self.workdir_files: dict[str, bytes] = {}
        # Fields about the data for `results.json`. Tasks with `labels` set "evaluated_on", for plots.
        self.results: dict[str, Any] = {}
        # Additional tasks to evaluate with the same parameters, keyed by a prefix of their metric names.
        self.other_tasks: dict[str, Task] = {}

    @property
    def phase_schedule(self) -> tuple[tuple[int, float], ...]:
        """Stop step (exclusive) and peak learning rate of each training phase."""
        return ((self.total_steps, self.config.optimizer.learning_rate),)

    def objective_at(self, update: int) -> Objective:
        """Returns the objective for an update (counted from 1) and the evaluation after it (0: before any update).

        All objectives of a run have the same parameters, metrics and loss weights. They may differ in RoPE thetas,
        which phases of pre-training may change.
        """
        return self.objective

    def output_layer(self) -> OutputLayer | None:
        """Returns a description of the output layer, or None if inference and conversion do not support the task."""
        return None

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields this process's rows (`shard`) of each training batch, starting at `start_step`."""
        raise UsageError("the task has no training data; build it with build_task(config, train=True)")

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields this process's rows of each evaluation batch. Each example occurs once; padding rows have weight 0."""
        raise UsageError("the task has no evaluation data; set a corpus or data files in config.data")

    def check_data_files(self, wait: bool) -> None:
        """Raises a BertjaxError if a background check found damaged data. With `wait`, completes the check first.

        The default implementation checks nothing.
        """

    def unfrozen_cost_before(self, step: int) -> StepCost:
        """Returns the cost of all steps before `step`, as if no parameter were frozen (for `training/cost.py`)."""
        raise NotImplementedError

    def synthetic_sizes(self, phase: int = 0) -> dict[str, int]:
        """Returns the argument `sizes` of `data.schema.synthetic_batch` for a phase."""
        raise NotImplementedError

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        """Formats a row of a batch as text."""
        return str({name: values[row] for name, values in batch.items()})

    def final_metrics(self, means: dict[str, float], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Returns all metrics of an evaluation.

        Args:
          means: mean of each metric over the evaluation data, computed from the metric sums, and the total `loss`.
          outputs: outputs of each evaluation batch, in order.
        """
        return means

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of a trivial baseline for comparison (default: {}, no baseline)."""
        return {}

    def class_reports(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
        """Returns the class report of each evaluation set, keyed by the suffix of the set's metric names.

        The suffix is "" for the first set, and `_mismatched` for the second set of MNLI.
        """
        return {}
