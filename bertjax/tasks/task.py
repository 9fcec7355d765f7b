"""What a task is to the training loop: a model, its losses as sums and weights, and its batches."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from bertjax.data.settings import Phase

Batch = dict[str, jax.Array]
NumpyBatch = dict[str, np.ndarray]
# Metric name -> float32 [2]: a sum over examples or tokens, and the weight it is to be divided by.
Sums = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Task:
    """Pure functions and shapes; built from a config by `bertjax.tasks.NAME.build`.

    Attributes:
      model: the Flax module, called as `model.apply({"params": params}, batch, deterministic=...)`.
      metrics: names of all metrics that `sums` returns.
      losses: those of them whose means add up to the loss.
      denominators: batch to the weight of each loss over the whole global batch. Known from the batch alone, so that
        gradients of micro-batches add up to exactly the gradient of the batch.
      sums: (params, batch, dropout key or None) to metric sums.
      phases: in order, without gaps.
      abstract_batch: a phase to the shapes of one global batch.
      train_batches: (phase, first step) to this process's rows of the batches of that step and those after.
      eval_batches: this process's rows of the evaluation batches; every example exactly once, padding has weight 0.
      synthetic_batch: a phase to a batch of random numbers, for benchmarks.
      baseline: metrics of the best guess that looks at no input, on the evaluation batches.
      files: name to content of what the workdir keeps, so that its checkpoints can be used without the corpus.
      data_hash: SHA-256 that changes with the data, so that no run goes on with other data at the same path; "" where
        there is none.
    """

    model: nn.Module
    metrics: tuple[str, ...]
    losses: tuple[str, ...]
    denominators: Callable[[Batch], dict[str, jax.Array]]
    sums: Callable[[Any, Batch, jax.Array | None], Sums]
    phases: tuple[Phase, ...]
    abstract_batch: Callable[[Phase], dict[str, jax.ShapeDtypeStruct]]
    train_batches: Callable[[Phase, int], Iterator[NumpyBatch]]
    eval_batches: Callable[[], Iterator[NumpyBatch]]
    synthetic_batch: Callable[[Phase], NumpyBatch]
    baseline: Callable[[], dict[str, float]] = dict
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    data_hash: str = ""
