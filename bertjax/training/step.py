"""The train and evaluation steps: pure functions of state and batch, compiled once a batch shape."""

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
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs
from bertjax.training.compiler_options import compiler_options
from bertjax.training.freezing import check_frozen, trainable, updated, with_trained
from bertjax.training.optimizer import LearningRate, Optimizer
from bertjax.training.sharding import ACTIVATION_RULES, batch_sharding, parameter_shardings, replicated

# Of a batch, not of what is computed from it.
TOKEN_FRACTION, ATTENTION_FRACTION = "token_fraction", "attention_fraction"


@flax.struct.dataclass
class TrainState:
    """All that a step changes; a checkpoint holds this and nothing else.

    Attributes:
      step: int32 scalar, updates done.
      params: float32 parameters.
      opt_state: of the optimizer, for the parameters that are trained.
      sums: metric sums since the last logged step, so that a run resumed between two logged steps logs what an
        uninterrupted one does.
      bad_step: int32 scalar, the first step whose loss or gradient was not finite, -1 if none.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    sums: MetricSums
    bad_step: jax.Array


@functools.cache
def abstract_state(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without computing anything.

    Raises:
      UsageError: the optimizer freezes what the model has not, or all it has.
    """
    boxed = jax.eval_shape(lambda: _boxed_state(objective, optimizer, jax.random.key(0)))
    shardings = parameter_shardings(boxed, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        shardings,
    )


def init_state(objective: Objective, optimizer: Optimizer, mesh: Mesh, key: jax.Array) -> TrainState:
    """A fresh state, made on the devices that will hold it."""
    return _init(objective, optimizer, mesh)(key)


@functools.cache
def _init(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> Callable[[jax.Array], TrainState]:
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(objective, optimizer, mesh))
    return jax.jit(lambda key: nn.unbox(_boxed_state(objective, optimizer, key)), out_shardings=shardings)


def _boxed_state(objective: Objective, optimizer: Optimizer, key: jax.Array) -> TrainState:
    params = objective.initial(key)
    check_frozen(params, optimizer.frozen)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(trainable(params, optimizer.frozen)),
        sums={
            name: jnp.zeros(2, jnp.float32)
            for name in (*objective.metrics, "grad_norm", TOKEN_FRACTION, ATTENTION_FRACTION)
        },
        bad_step=jnp.full((), -1, jnp.int32),
    )


def fills(batch: Batch) -> MetricSums:
    """Of a batch's positions the share that are tokens, and of all pairs of positions of a row those in one sequence.

    The first is of what is done for each position, the second of what attention does.
    """
    real = is_token(batch).astype(jnp.float32)
    length = real.shape[-1]
    position = batch.get("position_ids", jnp.arange(length))
    # A sequence of n tokens has n * n pairs, the sum of the first n odd numbers.
    shares = {TOKEN_FRACTION: real, ATTENTION_FRACTION: real * (2 * position + 1) / length}
    return {name: jnp.stack([jnp.sum(share), jnp.float32(real.size)]) for name, share in shares.items()}


def zero_sums(state: TrainState) -> TrainState:
    """The state with its metric sums back at zero."""
    return state.replace(sums=jax.tree.map(jnp.zeros_like, state.sums))


@functools.cache
def make_train_step(
    objective: Objective, optimizer: Optimizer, mesh: Mesh, grad_accum_steps: int
) -> Callable[[TrainState, Batch, jax.Array, LearningRate], TrainState]:
    """Compiles `(state, batch, dropout key, learning rate) -> state`, once a batch shape; the state is donated.

    Args:
      objective: gives model and losses.
      optimizer: turns the gradient of the global batch into an update for a learning rate of 1.
      mesh: the devices.
      grad_accum_steps: micro-batches that the batch is worked through in. The losses' denominators are those of the whole
        batch, so the gradient is the same for any number, up to rounding and dropout's draws.
    """

    def gradients(
        params: Any, batch: Batch, denominators: dict[str, jax.Array], key: jax.Array
    ) -> tuple[Any, MetricSums]:
        def loss(trained: Any) -> tuple[jax.Array, MetricSums]:
            whole = with_trained(params, trained, optimizer.frozen)
            sums, _ = objective.compute(objective.model, whole, batch, key)
            return sum(sums[name][0] / denominators[name] for name in objective.losses), sums

        return jax.grad(loss, has_aux=True)(trainable(params, optimizer.frozen))

    def accumulated(
        params: Any, batch: Batch, denominators: dict[str, jax.Array], key: jax.Array
    ) -> tuple[Any, MetricSums]:
        # Strided, so that each device's rows stay on it: micro-batch i is rows i, i + n, i + 2 n, ...
        micro = jax.tree.map(lambda x: x.reshape(-1, grad_accum_steps, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total: Any, xs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            rows, index = xs
            part = gradients(params, rows, denominators, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, part), None

        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], micro), denominators, key),
        )
        return jax.lax.scan(add, zeros, (micro, jnp.arange(grad_accum_steps)))[0]

    def train_step(state: TrainState, batch: Batch, key: jax.Array, rate: LearningRate) -> TrainState:
        key = jax.random.fold_in(key, state.step)
        denominators = objective.denominators(batch)
        compute = gradients if grad_accum_steps == 1 else accumulated
        grads, sums = compute(state.params, batch, denominators, key)
        norm = optax.tree.norm(grads)
        trained = trainable(state.params, optimizer.frozen)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        updates = jax.tree.map(lambda update: rate.at(state.step) * update, updates)
        loss = sum(sums[name][0] / denominators[name] for name in objective.losses)
        bad = ~(jnp.isfinite(loss) & jnp.isfinite(norm)) & (state.bad_step < 0)
        sums = {**sums, "grad_norm": jnp.stack([norm, jnp.ones_like(norm)]), **fills(batch)}
        return TrainState(
            step=state.step + 1,
            params=updated(state.params, optax.apply_updates(trained, updates), optimizer.frozen),
            opt_state=opt_state,
            sums=jax.tree.map(jnp.add, state.sums, sums),
            bad_step=jnp.where(bad, state.step + 1, state.bad_step),
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
    """Compiles `(params, batch, sums so far) -> sums, outputs of the whole global batch`."""

    def eval_step(params: Any, batch: Batch, sums: MetricSums) -> tuple[MetricSums, Outputs]:
        more, outputs = objective.compute(objective.model, params, batch, None)
        return jax.tree.map(jnp.add, sums, more), outputs

    return jax.jit(in_mesh(eval_step, mesh), out_shardings=replicated(mesh))


def in_mesh(function: Callable, mesh: Mesh) -> Callable:
    """Traces `function` with the mesh and the rules for activations' logical axes in force."""

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(ACTIVATION_RULES):
            return function(*args)

    return traced


def compute_metrics(sums: dict[str, Any]) -> dict[str, float]:
    """Metric values from fetched sums; a metric without weight is left out."""
    return {name: float(total / weight) for name, (total, weight) in sums.items() if weight > 0}
