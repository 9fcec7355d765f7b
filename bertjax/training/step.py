"""The train and evaluation steps: pure functions of state and batch, compiled once per batch shape."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bertjax.data.schema import is_token
from bertjax.errors import UsageError
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs
from bertjax.training.compiler_options import compiler_options
from bertjax.training.freezing import check_frozen, merge_trainable, trainable, update_trainable
from bertjax.training.optimizer import Optimizer
from bertjax.training.sharding import ACTIVATION_RULES, batch_sharding, parameter_shardings, replicated

# Metrics of the batch itself, not of the model's outputs.
TOKEN_FRACTION, ATTENTION_FRACTION = "token_fraction", "attention_fraction"
_STEP_METRICS = ("grad_norm", TOKEN_FRACTION, ATTENTION_FRACTION)


@flax.struct.dataclass
class TrainState:
    """Everything that a step changes, and that a checkpoint contains.

    Attributes:
      step: int32 scalar, number of updates.
      params: float32 parameters.
      opt_state: optimizer state of the trainable parameters.
      sums: metric sums since the last logged step, so that a run resumed between two logged steps logs the same values
        as an uninterrupted one.
      bad_step: int32 scalar, the first step with a loss or gradient that is not finite, -1 if none.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    sums: MetricSums
    bad_step: jax.Array


@functools.cache
def make_train_step(
    objective: Objective, optimizer: Optimizer, mesh: Mesh, grad_accum_steps: int
) -> Callable[[TrainState, Batch, jax.Array, optax.Schedule], TrainState]:
    """Compiles the train step `(state, batch, dropout key, learning-rate schedule) -> state`; the state is donated.

    The step is cached by value, so that the trials of a sweep share one compilation.

    Args:
      objective: model and losses.
      optimizer: optax transformation and frozen parameters.
      mesh: device mesh.
      grad_accum_steps: micro-batches per step. The denominators of the losses are those of the whole batch, so the
        gradient is the same for any number, up to rounding and dropout.

    Raises:
      UsageError: the loss of the objective cannot be computed on micro-batches.
    """
    if grad_accum_steps > 1 and not objective.splits_into_micro_batches:
        raise UsageError(
            f"config.grad_accum_steps={grad_accum_steps} is not possible: the loss of a row depends on the other rows "
            "of its batch; use 1"
        )
    tx, frozen = optimizer

    def total_loss(sums: MetricSums, denominators: dict[str, jax.Array]) -> jax.Array:
        return sum(sums[name][0] / denominators[name] for name in objective.losses)

    def loss_and_grads(
        params: Any, batch: Batch, denominators: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[Any, MetricSums]:
        def loss_fn(trained: Any) -> tuple[jax.Array, MetricSums]:
            sums, _ = objective.compute(merge_trainable(params, trained, frozen), batch, dropout_key)
            return total_loss(sums, denominators), sums

        return jax.grad(loss_fn, has_aux=True)(trainable(params, frozen))

    def accumulate(
        params: Any, batch: Batch, denominators: dict[str, jax.Array], dropout_key: jax.Array
    ) -> tuple[Any, MetricSums]:
        # Micro-batch i is rows i, i + n, i + 2n, ..., so that each device keeps its rows.
        micro_batches = jax.tree.map(lambda x: x.reshape(-1, grad_accum_steps, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total: Any, xs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            micro_batch, index = xs
            part = loss_and_grads(params, micro_batch, denominators, jax.random.fold_in(dropout_key, index))
            return jax.tree.map(jnp.add, total, part), None

        first = jax.tree.map(lambda x: x[0], micro_batches)
        shapes = jax.eval_shape(loss_and_grads, params, first, denominators, dropout_key)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.scan(add, zeros, (micro_batches, jnp.arange(grad_accum_steps)))[0]

    def train_step(state: TrainState, batch: Batch, key: jax.Array, schedule: optax.Schedule) -> TrainState:
        dropout_key = jax.random.fold_in(key, state.step)
        denominators = objective.denominators(batch)
        compute_grads = loss_and_grads if grad_accum_steps == 1 else accumulate
        grads, sums = compute_grads(state.params, batch, denominators, dropout_key)

        params = trainable(state.params, frozen)
        updates, opt_state = tx.update(grads, state.opt_state, params)
        learning_rate = schedule(state.step)
        params = optax.apply_updates(params, jax.tree.map(lambda update: -learning_rate * update, updates))

        grad_norm = optax.tree.norm(grads)
        is_finite = jnp.isfinite(total_loss(sums, denominators)) & jnp.isfinite(grad_norm)
        sums = {**sums, "grad_norm": jnp.stack([grad_norm, jnp.ones_like(grad_norm)]), **batch_fractions(batch)}
        return TrainState(
            step=state.step + 1,
            params=update_trainable(state.params, params, frozen),
            opt_state=opt_state,
            sums=jax.tree.map(jnp.add, state.sums, sums),
            bad_step=jnp.where(~is_finite & (state.bad_step < 0), state.step + 1, state.bad_step),
        )

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(objective, optimizer, mesh))
    return jax.jit(
        in_mesh(train_step, mesh),
        in_shardings=(shardings, batch_sharding(mesh), replicated(mesh), replicated(mesh)),
        out_shardings=shardings,
        donate_argnums=0,
        compiler_options=compiler_options(mesh),
    )


@functools.cache
def make_eval_step(objective: Objective, mesh: Mesh) -> Callable[[Any, Batch, MetricSums], tuple[MetricSums, Outputs]]:
    """Compiles `(params, batch, sums so far) -> (sums, outputs of the global batch)`."""

    def eval_step(params: Any, batch: Batch, sums: MetricSums) -> tuple[MetricSums, Outputs]:
        batch_sums, outputs = objective.compute(params, batch, None)
        return jax.tree.map(jnp.add, sums, batch_sums), outputs

    return jax.jit(in_mesh(eval_step, mesh), out_shardings=replicated(mesh))


@functools.cache
def abstract_state(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Returns shapes, dtypes and shardings of the state without computing anything.

    Raises:
      UsageError: the optimizer freezes parameters that do not exist, or all of them.
    """
    boxed = jax.eval_shape(lambda: _boxed_state(objective, optimizer, jax.random.key(0)))
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        parameter_shardings(boxed, mesh),
    )


def init_state(objective: Objective, optimizer: Optimizer, mesh: Mesh, key: jax.Array) -> TrainState:
    """Initializes the state on the devices that will hold it."""
    return _make_init(objective, optimizer, mesh)(key)


@functools.cache
def _make_init(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> Callable[[jax.Array], TrainState]:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(objective, optimizer, mesh))
    return jax.jit(lambda key: nn.unbox(_boxed_state(objective, optimizer, key)), out_shardings=shardings)


def _boxed_state(objective: Objective, optimizer: Optimizer, key: jax.Array) -> TrainState:
    params = objective.init_params(key)
    check_frozen(params, optimizer.frozen)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.tx.init(trainable(params, optimizer.frozen)),
        sums={name: jnp.zeros(2, jnp.float32) for name in (*objective.metrics, *_STEP_METRICS)},
        bad_step=jnp.full((), -1, jnp.int32),
    )


def batch_fractions(batch: Batch) -> MetricSums:
    """Returns the metric sums of two fractions of a batch.

    TOKEN_FRACTION is the fraction of positions that are tokens. ATTENTION_FRACTION is the fraction of position pairs
    that are in the same sequence, which is the fraction of attention's work that is not padding.
    """
    tokens = is_token(batch).astype(jnp.float32)
    length = tokens.shape[-1]
    position = batch.get("position_ids", jnp.arange(length))
    # Token i of a sequence adds 2 i + 1 pairs, so that n tokens have n * n.
    fractions = {TOKEN_FRACTION: tokens, ATTENTION_FRACTION: tokens * (2 * position + 1) / length}
    return {name: jnp.stack([jnp.sum(values), jnp.float32(tokens.size)]) for name, values in fractions.items()}


def reset_sums(state: TrainState) -> TrainState:
    """Returns the state with its metric sums at zero."""
    return state.replace(sums=jax.tree.map(jnp.zeros_like, state.sums))


def in_mesh(function: Callable, mesh: Mesh) -> Callable:
    """Wraps a function so that it is traced under the mesh and the logical axis rules of activations."""

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(ACTIVATION_RULES):
            return function(*args)

    return traced


def compute_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Returns the mean of each metric from sums on the host; metrics with weight 0 are left out."""
    return {name: float(total / weight) for name, (total, weight) in sums.items() if weight > 0}
