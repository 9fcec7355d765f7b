"""The train and evaluation steps: pure functions of state and batch, compiled once a batch shape."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bertjax.tasks.task import Batch, Sums, Task
from bertjax.training.sharding import ACTIVATION_RULES, batch_sharding, parameter_shardings, replicated


@flax.struct.dataclass
class TrainState:
    """All that a step changes; a checkpoint holds this and nothing else.

    Attributes:
      step: int32 scalar, updates done.
      params: float32 parameters.
      opt_state: of the optimizer.
      sums: metric sums since the last logged step, so that a run resumed between two logged steps logs what an
        uninterrupted one does.
      bad_step: int32 scalar, the first step whose loss or gradient was not finite, -1 if none.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    sums: Sums
    bad_step: jax.Array


def abstract_state(task: Task, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state, without computing anything."""
    boxed = jax.eval_shape(lambda: _boxed_state(task, optimizer, jax.random.key(0)))
    shardings = parameter_shardings(boxed, mesh)
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        nn.unbox(boxed),
        shardings,
    )


def init_state(task: Task, optimizer: optax.GradientTransformation, mesh: Mesh, key: jax.Array) -> TrainState:
    """A fresh state, made on the devices that will hold it."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(task, optimizer, mesh))
    init = jax.jit(lambda key: nn.unbox(_boxed_state(task, optimizer, key)), out_shardings=shardings)
    return init(key)


def _boxed_state(task: Task, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    shapes = task.abstract_batch(task.phases[0])
    batch = {name: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype) for name, leaf in shapes.items()}
    params = task.model.init(key, batch)["params"]
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(params),
        sums={name: jnp.zeros(2, jnp.float32) for name in (*task.metrics, "grad_norm")},
        bad_step=jnp.full((), -1, jnp.int32),
    )


def zero_sums(state: TrainState) -> TrainState:
    """The state with its metric sums back at zero."""
    return state.replace(sums=jax.tree.map(jnp.zeros_like, state.sums))


def make_train_step(
    task: Task, optimizer: optax.GradientTransformation, mesh: Mesh, accumulate: int
) -> Callable[[TrainState, Batch, jax.Array], TrainState]:
    """Compiles `(state, batch, dropout key) -> state`; the state is donated.

    Args:
      task: gives model and losses.
      optimizer: turns the gradient of the global batch into an update.
      mesh: the devices.
      accumulate: micro-batches that the batch is worked through in. The losses' denominators are those of the whole
        batch, so the gradient is the same for any number, up to rounding and dropout's draws.
    """

    def gradients(params: Any, batch: Batch, denominators: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Sums]:
        def loss(params: Any) -> tuple[jax.Array, Sums]:
            sums = task.sums(params, batch, key)
            return sum(sums[name][0] / denominators[name] for name in task.losses), sums

        return jax.grad(loss, has_aux=True)(params)

    def accumulated(params: Any, batch: Batch, denominators: dict[str, jax.Array], key: jax.Array) -> tuple[Any, Sums]:
        # Strided, so that each device's rows stay on it: micro-batch i is rows i, i + n, i + 2 n, ...
        micro = jax.tree.map(lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total: Any, xs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            rows, index = xs
            part = gradients(params, rows, denominators, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, part), None

        zeros = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(gradients, params, jax.tree.map(lambda x: x[0], micro), denominators, key),
        )
        return jax.lax.scan(add, zeros, (micro, jnp.arange(accumulate)))[0]

    def train_step(state: TrainState, batch: Batch, key: jax.Array) -> TrainState:
        key = jax.random.fold_in(key, state.step)
        denominators = task.denominators(batch)
        compute = gradients if accumulate == 1 else accumulated
        grads, sums = compute(state.params, batch, denominators, key)
        norm = optax.tree.norm(grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        loss = sum(sums[name][0] / denominators[name] for name in task.losses)
        bad = ~(jnp.isfinite(loss) & jnp.isfinite(norm)) & (state.bad_step < 0)
        sums = {**sums, "grad_norm": jnp.stack([norm, jnp.ones_like(norm)])}
        return TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            sums=jax.tree.map(jnp.add, state.sums, sums),
            bad_step=jnp.where(bad, state.step + 1, state.bad_step),
        )

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(task, optimizer, mesh))
    return jax.jit(
        in_mesh(train_step, mesh),
        in_shardings=(shardings, batch_sharding(mesh), replicated(mesh)),
        out_shardings=shardings,
        donate_argnums=0,
    )


def make_eval_step(task: Task, mesh: Mesh) -> Callable[[Any, Batch, Sums], Sums]:
    """Compiles `(params, batch, sums so far) -> sums`."""

    def eval_step(params: Any, batch: Batch, sums: Sums) -> Sums:
        return jax.tree.map(jnp.add, sums, task.sums(params, batch, None))

    return jax.jit(in_mesh(eval_step, mesh), out_shardings=replicated(mesh))


def in_mesh(function: Callable, mesh: Mesh) -> Callable:
    """Traces `function` with the mesh and the rules for activations' logical axes in force."""

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), nn.logical_axis_rules(ACTIVATION_RULES):
            return function(*args)

    return traced


def means(sums: dict[str, Any]) -> dict[str, float]:
    """Metric values from fetched sums; a metric without weight is left out."""
    return {name: float(total / weight) for name, (total, weight) in sums.items() if weight > 0}
