"""Train state: parameters, optimizer state and metric sums, with their shardings."""

import functools
from collections.abc import Callable
from typing import Any, Self

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bertjax.tasks.objectives.step_cost import ATTENTION_FRACTION, TOKEN_FRACTION
from bertjax.tasks.task import MetricSums, Objective
from bertjax.training.freezing import check_freezing
from bertjax.training.optimizer import Optimizer
from bertjax.training.sharding import with_shardings

# Metrics that the train step adds to the objective's metrics.
STEP_METRICS = ("grad_norm", TOKEN_FRACTION, ATTENTION_FRACTION)


class TrainState(flax.struct.PyTreeNode):
    """Train state: everything that a step updates and a checkpoint contains.

    Attributes:
      step: int32 scalar, number of updates.
      params: float32 parameters.
      opt_state: optimizer state of the trainable parameters.
      sums: [weighted sum, sum of weights] of each metric since the last logged step. A resumed run continues these
        sums, so that it logs the same values as an uninterrupted run.
      bad_step: int32 scalar, first step whose loss or gradient is not finite (-1: all are finite). The step still
        applies its update; the loop raises an error at the next log line or checkpoint.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    sums: MetricSums
    bad_step: jax.Array

    @property
    def eval_field(self) -> str:
        """Name of the field with the parameters to evaluate, which `--init_from` and inference load."""
        return "params"

    @property
    def eval_params(self) -> Any:
        """Parameters to evaluate."""
        return getattr(self, self.eval_field)

    def with_initial_params(self, params: Any) -> Self:
        """Returns the initial state of a run that starts with the parameters of a checkpoint."""
        return self.replace(params=params)


@functools.cache
def abstract_params(objective: Objective, mesh: Mesh) -> Any:
    """Returns shapes, dtypes and shardings of the parameters without computing anything."""
    return with_shardings(jax.eval_shape(objective.init_params, jax.random.key(0)), mesh)


@functools.cache
def abstract_state(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Returns shapes, dtypes and shardings of the state without computing anything.

    Raises a UsageError if the optimizer freezes an unknown parameter, or leaves no parameter to train.
    """
    return with_shardings(jax.eval_shape(lambda: _boxed_state(objective, optimizer, jax.random.key(0))), mesh)


def init_state(objective: Objective, optimizer: Optimizer, mesh: Mesh, key: jax.Array) -> TrainState:
    """Initializes the state directly on the devices, with its shardings."""
    return _make_init(objective, optimizer, mesh)(key)


@functools.cache
def _make_init(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> Callable[[jax.Array], TrainState]:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(objective, optimizer, mesh))
    return jax.jit(lambda key: nn.unbox(_boxed_state(objective, optimizer, key)), out_shardings=shardings)


def _boxed_state(objective: Objective, optimizer: Optimizer, key: jax.Array) -> TrainState:
    """Returns the initial state, with parameters boxed with their logical axes."""
    params = objective.init_params(key)
    check_freezing(params, optimizer.freezing)
    names = (*(metric.name for metric in objective.metrics), *STEP_METRICS)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.tx.init(optimizer.freezing.split(params)[0]),
        sums={name: jnp.zeros(2, jnp.float32) for name in names},
        bad_step=jnp.full((), -1, jnp.int32),
    )


def reset_sums(state: TrainState) -> TrainState:
    """Returns the state with its metric sums at zero."""
    return state.replace(sums=jax.tree.map(jnp.zeros_like, state.sums))
