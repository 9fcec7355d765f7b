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
from bertjax.model.encoder import ENCODER
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
    `sums` is the result of `compute`. With gradient accumulation, `sums` covers one micro-batch, but `denominators`
    cover the whole batch. A denominator is usually the sum of the weights, or a positive number if this sum is 0.

    Logged values have other denominators: the sums of the weights over all steps since the last log line. Log lines
    show the total loss and each metric that is not a loss.

    Objectives are compared by value, because compiled steps are cached by objective: runs that differ only in data,
    seed or learning rate share a step. A subclass defines `metrics`, `schema`, `denominators` and `compute`.

    Attributes:
      model: Flax module that is applied to a batch. Its field `config` is a `ModelConfig`.
      metrics: metrics that `compute` returns.
      schema: specifications of the arrays in a training batch.
      splits_into_micro_batches: whether gradient accumulation may split a batch into micro-batches, which are processed
        one after the other (default: True). Set it to False if the loss of a row depends on other rows, as with
        in-batch negatives.
      can_add_pieces: whether the data's vocabulary may have pieces that the vocabulary of an `--init_from` checkpoint
        lacks (default: False).
    """

    model: nn.Module
    splits_into_micro_batches: ClassVar[bool] = True
    can_add_pieces: ClassVar[bool] = False

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

        Divisors are computed from the whole batch, not from a micro-batch, so that the gradients of micro-batches add
        up to the gradient of the batch.
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
        # Parameter shapes do not depend on the axis sizes of the dummy batch. LSTMs need at least two positions.
        batch = {
            spec.name: jnp.zeros((1, *(8 if axis == "length" else 1 for axis in spec.axes)), spec.dtype)
            for spec in self.schema
        }
        # Attention kernels reject rows this short, so initialize with XLA attention.
        config = dataclasses.replace(self.model.config, attention="xla")
        return self.model.clone(config=config).init(key, batch)["params"]


class Task:
    """Objective, data, schedule and evaluation of a run.

    By default, evaluation metrics are computed from the metric sums only. A subclass sets the attributes that have no
    default, and defines `train_batches`, `eval_batches`, `full_cost_before` and `axis_sizes`. Step s, counted from 0,
    makes update s + 1. Log lines and checkpoints have the number of updates. `data/schema.py` explains schemas.

    Objective and schedule:
      config: configuration of the run.
      objective: loss and metrics of a train step.
      total_steps: optimizer steps of the run.
      warmup_steps: steps of linear learning-rate warm-up.
      has_schedule: whether `total_steps` and `warmup_steps` are known (default: True). They are placeholders if the
        task was built without data, for `bertjax describe` and `bertjax plan`.
      batch_sizes: rows of the global batch of each training phase, multiples of data shards times micro-batches
        (default: (), no training data). A phase is a range of steps with one batch shape.
      steps_per_epoch: steps per epoch (default: 0, the task has no epochs).
      checkpoint_every: steps between checkpoints, at least 1. The last step is always saved.

    Evaluation:
      eval_batch_size: rows of the global evaluation batch, a multiple of the number of data shards.
      eval_every: steps between evaluations; the last step is always evaluated (0: never).
      eval_first: whether to evaluate before the first step as well (default: False).
      num_eval_batches: number of batches per evaluation, for the progress bar (default: 0, unknown). `eval_batches` may
        set it.
      best_metric: evaluation metric that selects the best checkpoint (default: None, use the newest checkpoint).
      other_tasks: additional tasks to evaluate with the same parameters. The keys are prefixes of metric names
        (default: {}).
      labels: names of the classes or tags by id, for `class_reports` (default: (), no classes).
      accepts_any_encoder: whether `evaluate` also accepts checkpoints of other tasks that contain the model's
        parameters (default: False).
      evaluation_problem: error message of `train` and `evaluate` if the evaluation data cannot be used (default: "", no
        problem).

    Start from a checkpoint (`--init_from`):
      reinit_params: names of the top-level parameters above the encoder (default: (): pre-training). They are randomly
        initialized, unless the checkpoint has an output layer with the same labels.
      has_cached_features: whether batches contain features that the checkpoint's encoder computed before training
        (default: False). If so, the run cannot resume with a different checkpoint in `--init_from`.

    Data and workdir:
      data_hash: SHA-256 of the data (default: "", no data). A run cannot resume if the data at the same path changed.
      workdir_files: files to store in the workdir (content by name), so that checkpoints can be used without the data
        (default: {}).
      results: fields about the data for `results.json` (default: {}). A task with `labels` sets `evaluated_on`, the
        name of the evaluation data.
      notes: log lines about the data (default: ()).
    """

    objective: Objective
    total_steps: int
    warmup_steps: int
    has_schedule = True
    batch_sizes: tuple[int, ...] = ()
    steps_per_epoch = 0
    checkpoint_every: int

    eval_batch_size: int
    eval_every: int
    eval_first = False
    num_eval_batches = 0
    best_metric: Metric | None = None
    labels: Sequence[str] = ()
    accepts_any_encoder = False
    evaluation_problem = ""

    reinit_params: tuple[str, ...] = ()
    has_cached_features = False

    data_hash = ""
    notes: tuple[str, ...] = ()

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.workdir_files: dict[str, bytes] = {}
        self.results: dict[str, Any] = {}
        self.other_tasks: dict[str, Task] = {}

    @property
    def phase_schedule(self) -> tuple[tuple[int, float], ...]:
        """Stop step (exclusive) and peak learning rate of each training phase, whose batches have the same shape."""
        return ((self.total_steps, self.config.optimizer.learning_rate),)

    def objective_at(self, num_updates: int) -> Objective:
        """Returns the objective of update `num_updates`, and of a checkpoint after this update (0: before training).

        All objectives of a run have the same parameters, metrics and loss weights. They may differ in RoPE thetas,
        which phases of pre-training may change.
        """
        return self.objective

    def train_batches(self, start_step: int, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields the shard's rows of each training batch, starting at `start_step`."""
        raise UsageError("the task has no training data; build it with build_task(config, train=True)")

    def eval_batches(self, shard: DataShard) -> Iterator[NumpyBatch]:
        """Yields the shard's rows of each evaluation batch. Every example occurs once. Padding rows have weight 0."""
        raise UsageError("the task has no evaluation data; set a corpus or data files in config.data")

    def check_data_files(self, wait: bool) -> None:
        """Raises a BertjaxError if a background check found damaged data. With `wait`, completes the check first."""

    # Costs serve only to report tokens seen, MFU and remaining time.

    def full_cost_before(self, step: int) -> StepCost:
        """Returns the total cost of all steps before `step`, as if all parameters were trained."""
        raise NotImplementedError

    def trained_cost(self, cost: StepCost, head_only: bool = False) -> StepCost:
        """Returns the cost of steps whose full cost is `cost`, without the backward pass of frozen layers.

        Output, gradient of the input and gradient of the weights of a dense layer take a third of its FLOPs each. The
        products of attention have no weights. Frozen layers compute only the output or, if the embeddings below them
        are trained, also gradients of inputs. Steps with `head_only`, the steps before `optimizer.head_steps`, train
        only the head, whose own backward pass is not counted.
        """
        optimizer = self.config.optimizer
        frozen = optimizer.freeze_layers / self.objective.model.config.num_hidden_layers
        if head_only or ENCODER in optimizer.freeze:
            dense_share, attention_share = 1 / 3, 1 / 3
        elif f"{ENCODER}/embeddings" in optimizer.freeze:
            dense_share, attention_share = 1 - frozen * 2 / 3, 1 - frozen * 2 / 3
        else:
            dense_share, attention_share = 1 - frozen / 3, 1.0
        attention_flops = cost.attention_flops * attention_share
        flops = (cost.flops - cost.attention_flops) * dense_share + attention_flops
        return dataclasses.replace(cost, flops=flops, attention_flops=attention_flops)

    def cost_of_step(self, step: int) -> StepCost:
        """Returns the cost of step `step` as if `optimizer.head_steps` were 0, for `bench` and `plan`."""
        return self.trained_cost(self.full_cost_before(step + 1) - self.full_cost_before(step))

    def cost_before(self, step: int) -> StepCost:
        """Returns the total cost of all steps before `step`, to compute tokens seen, MFU and remaining time."""
        head = self.full_cost_before(min(step, self.config.optimizer.head_steps))
        return self.trained_cost(head, head_only=True) + self.trained_cost(self.full_cost_before(step) - head)

    def axis_sizes(self, phase: int = 0) -> dict[str, int]:
        """Returns the sizes of a phase's synthetic batches: `rows`, and each axis and `num_values` of the schema.

        For example, `ArraySpec("masked_lm_ids", ("predictions",), num_values="pieces")` needs `predictions` and
        `pieces`.
        """
        raise NotImplementedError

    def format_row(self, batch: NumpyBatch, row: int) -> str:
        """Formats a row of a batch as text."""
        return str({name: values[row] for name, values in batch.items()})

    def final_metrics(self, means: dict[str, float], outputs: list[dict[str, np.ndarray]]) -> dict[str, float]:
        """Returns all metrics of an evaluation.

        Args:
          means: mean of each metric over the evaluation data, computed from the metric sums.
          outputs: outputs of each evaluation batch, in order.
        """
        return means

    def baseline(self) -> dict[str, float]:
        """Returns the metrics of a trivial baseline, to compare with (default: {}, no baseline)."""
        return {}

    def class_reports(self, outputs: list[dict[str, np.ndarray]]) -> dict[str, ClassReport]:
        """Returns the class report of each evaluation set, keyed by the suffix of the set's metric names.

        The suffix is "" for the first set, and `_mismatched` for the second set of MNLI.
        """
        return {}
