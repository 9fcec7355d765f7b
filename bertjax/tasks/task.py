"""What a task is to the training loop: a pure objective, and the batches it is computed on."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.finetuning.examples import Examples
from bertjax.data.schema import Schema, abstract_batch
from bertjax.data.shard import DataShard
from bertjax.metrics.report import ClassReport
from bertjax.tasks.finetuning.records import FileRecords

Batch = dict[str, jax.Array]
NumpyBatch = dict[str, np.ndarray]
# Metric name -> float32 [2]: a sum over examples or tokens, and the weight it is to be divided by.
MetricSums = dict[str, jax.Array]
# Of a batch to initialise a model with; parameters do not depend on them.
_SMALLEST = {"length": 8, "predictions": 1, "choices": 1, "labels": 1, "pairs": 1}
# What evaluation keeps of each row, name -> [B, ...]; empty where sums say all.
Outputs = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a step computes. Equal by value, so that runs which differ in data, seed or rate share one compilation.

    Attributes:
      model: the Flax module.
      metrics: names of all metrics that `compute` returns.
      losses: those of them whose means add up to the loss.
      denominators: batch to the weight of each loss over the whole global batch. Known from the batch alone, so that
        gradients of micro-batches add up to exactly the gradient of the batch.
      compute: (model, params, batch, dropout key or None) to metric sums and outputs.
      schema: of a batch.
    """

    model: nn.Module
    metrics: tuple[str, ...]
    losses: tuple[str, ...]
    denominators: Callable[[Batch], dict[str, jax.Array]]
    compute: Callable[[nn.Module, Any, Batch, jax.Array | None], tuple[MetricSums, Outputs]]
    schema: Schema

    def initial(self, key: jax.Array) -> Any:
        """Parameters of the model, with logical axes; no batch and no implementation of attention changes them."""
        shapes = abstract_batch(self.schema, 1, **_SMALLEST)
        batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
        # One that takes so short a row.
        config = dataclasses.replace(self.model.config, attention="plain")
        return self.model.clone(config=config).init(key, batch)["params"]


@dataclasses.dataclass(frozen=True)
class Cadence:
    """When things happen, in steps; all known once a config meets its data.

    Attributes:
      steps: of the whole run.
      warmup_steps: of the learning rate.
      eval_every, checkpoint_every: the last step is evaluated and saved in any case; `eval_every` 0 turns evaluation
        off.
      eval_first: also evaluate before the first step.
      patience: evaluations without a better one after which the run ends; 0 is never.
    """

    steps: int
    warmup_steps: int
    eval_every: int
    checkpoint_every: int
    eval_first: bool
    patience: int = 0


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What some steps amount to, as far as it is known before their batches are.

    Attributes:
      rows: of all batches.
      positions: of all rows, with padding.
      flops: of the model, if all positions were tokens that attend to their whole row.
      attention_flops: those of them that are attention's.
    """

    rows: int
    positions: int
    flops: float
    attention_flops: float = 0.0

    def since(self, before: "StepCost") -> "StepCost":
        """What is between another and this."""
        return StepCost(
            *(getattr(self, part.name) - getattr(before, part.name) for part in dataclasses.fields(StepCost))
        )

    def real_flops(self, fill: float, attention_fraction: float) -> float:
        """FLOPs for tokens, and for attention within their sequences: for what `step.fills` says is not padding."""
        return fill * (self.flops - self.attention_flops) + attention_fraction * self.attention_flops


@dataclasses.dataclass(frozen=True)
class Task:
    """An objective with its data; built from a config by `bertjax.tasks.NAME.build`.

    Attributes:
      objective: what a step computes.
      schedule: when things happen.
      batch_sizes: rows of the global batches there are, which must split over the devices.
      train_batches: first step and share to the share's rows of the batch of that step and all after.
      eval_batches: share to its rows of the evaluation batches; every example exactly once, padding has weight 0.
      eval_steps: batches of an evaluation, to tell the time left; 0 where they are not known before.
      work: a step to what all steps before it amount to.
      synthetic_batch: a batch of the shape that a phase's batches have, for benchmarks: of random numbers, or where
        there is data one that most are like.
      usual_step: a step whose batch has the shape of the first phase's `synthetic_batch`.
      phase_steps: steps of each phase, in which all batches have one shape; () is one phase.
      show: (batch, row) to the row as text, for a person.
      score: (means of the evaluation's sums, outputs of its batches in order) to all its metrics.
      baseline: metrics of the best guess that looks at no input, on the evaluation batches.
      check_data: raises a BertjaxError if data that was read so far is damaged; given a number of steps, it first
        checks everything that those steps and the evaluations read.
      best_by: the evaluation metric by which the best checkpoint is kept; `selection.is_error` tells of which less is
        better. "" keeps the newest.
      per_class: outputs of the evaluation batches to what became of each class, by the suffix that the metrics of an
        evaluation set have; None where there are no classes.
      unlabelled: name of what is evaluated where it has no labels, and so no metrics; "" where it has.
      write: (outputs of the evaluation batches, folder) to the prediction files it wrote; None where there are none.
      records: what is written beside those files: a record of each row, with probabilities.
      featured: takes a function of examples to the states of a frozen encoder for each of their tokens, and gives the
        task whose batches have them; None where no encoder is frozen for good.
      states_of: fingerprint of the checkpoint whose encoder's states the batches have; "" where they have none.
      fresh: top-level parameters that never come from the checkpoint a run starts from.
      files: name to content of what the workdir keeps, so that its checkpoints can be used without the data.
      report: what was read, for `results.json`.
      notes: the same in lines for a person.
      data_hash: SHA-256 that changes with the data, so that no run goes on with other data at the same path; "" where
        there is none.
    """

    objective: Objective
    schedule: Cadence
    batch_sizes: tuple[int, ...]
    train_batches: Callable[[int, DataShard], Iterator[NumpyBatch]]
    eval_batches: Callable[[DataShard], Iterator[NumpyBatch]]
    work: Callable[[int], StepCost]
    synthetic_batch: Callable[[int], NumpyBatch]
    show: Callable[[NumpyBatch, int], str]
    score: Callable[[dict[str, float], list[dict[str, np.ndarray]]], dict[str, float]] = lambda means, outputs: means
    baseline: Callable[[], dict[str, float]] = dict
    check_data: Callable[[int | None], None] = lambda steps: None
    best_by: str = ""
    eval_steps: int = 0
    usual_step: Callable[[], int] = lambda: 0
    phase_steps: tuple[int, ...] = ()
    unlabelled: str = ""
    write: Callable[[list[dict[str, np.ndarray]], Path], list[Path]] | None = None
    records: tuple[FileRecords, ...] = ()
    per_class: Callable[[list[dict[str, np.ndarray]]], dict[str, ClassReport]] | None = None
    featured: "Callable[[Callable[[Examples], np.ndarray]], Task] | None" = None
    states_of: str = ""
    fresh: tuple[str, ...] = ()
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    report: dict[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    data_hash: str = ""
