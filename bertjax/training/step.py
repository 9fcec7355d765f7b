"""The train state, and the train and evaluation steps: pure functions of state and batch, compiled per batch shape."""

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Self

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from bertjax.errors import UsageError
from bertjax.model.encoder import ENCODER
from bertjax.tasks.objectives.step_cost import ATTENTION_FRACTION, TOKEN_FRACTION, non_padding_sums
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs
from bertjax.training.freezing import merge_frozen, restack_frozen, split_frozen, trainable_shapes
from bertjax.training.optimizer import Optimizer
from bertjax.training.sharding import batch_sharding, compiler_options, replicated, under_mesh, with_shardings

# Metrics that `train_step` adds to those of the objective: gradient norm, and the fractions of positions and of
# attention FLOPs that are not padding (see `non_padding_sums`). ATTENTION_FRACTION is not logged, but used for MFU.
STEP_METRICS = ("grad_norm", TOKEN_FRACTION, ATTENTION_FRACTION)


class TrainState(flax.struct.PyTreeNode):
    """Train state: everything that a step updates and a checkpoint contains (see `Checkpoints` in `checkpoint.py`)."""

    step: jax.Array  # int32 scalar, number of updates
    params: Any  # float32 parameters
    opt_state: Any  # optimizer state of the trainable parameters
    # [weighted sum, sum of weights] of each metric since the last logged step. A resumed run continues these sums, so
    # that it logs the same values as an uninterrupted run.
    sums: MetricSums
    # Int32 scalar, number of the first update with a loss or gradient that is not finite (-1: all are finite). The
    # update is still applied; the loop raises an error at the next log line, evaluation or checkpoint.
    bad_step: jax.Array

    # To evaluate other parameters, such as moving averages, change `eval_field` and `with_initial_params`; see
    # docs/extending.md.
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
    """Returns shapes, dtypes and shardings of the unboxed parameters without computing anything."""
    return with_shardings(jax.eval_shape(objective.init_params, jax.random.key(0)), mesh)


@functools.cache
def abstract_state(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """Returns shapes, dtypes and shardings of the unboxed state without computing anything.

    Raises a UsageError if the optimizer freezes an unknown parameter, or leaves no parameter to train.
    """
    return with_shardings(jax.eval_shape(lambda: _boxed_state(objective, optimizer, jax.random.key(0))), mesh)


@functools.cache
def make_init_state(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> Callable[[jax.Array], TrainState]:
    """Returns the jitted function that initializes the state on the devices, with its shardings, from a random key."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(objective, optimizer, mesh))
    return jax.jit(lambda key: nn.unbox(_boxed_state(objective, optimizer, key)), out_shardings=shardings)


@functools.cache
def make_init_opt_state(objective: Objective, optimizer: Optimizer, mesh: Mesh) -> Callable[[Any], Any]:
    """Returns the jitted function that initializes the optimizer state for the parameters of a train state."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(objective, optimizer, mesh).opt_state)
    return jax.jit(lambda params: optimizer.tx.init(split_frozen(params, optimizer.config)[0]), out_shardings=shardings)


def _boxed_state(objective: Objective, optimizer: Optimizer, key: jax.Array) -> TrainState:
    """Returns the initial state. Parameters and moments are in Flax boxes, whose axis names determine the shardings."""
    params = objective.init_params(key)
    trainable_shapes(params, optimizer.config)  # Raises if the config freezes all or nonexistent parameters.
    names = (*(metric.name for metric in objective.metrics), *STEP_METRICS)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.tx.init(split_frozen(params, optimizer.config)[0]),
        sums={name: jnp.zeros(2, jnp.float32) for name in names},
        bad_step=jnp.full((), -1, jnp.int32),
    )


def random_key(seed: int, purpose: str) -> jax.Array:
    """Derives a random key for a purpose, such as "init" or "dropout", from the seed of the run."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(purpose.encode()))


@functools.cache
def make_train_step(
    objective: Objective, optimizer: Optimizer, mesh: Mesh, grad_accum_steps: int, head_only: bool = False
) -> jax.stages.Wrapped:
    """Returns the jitted train step `(state, batch, key, schedule) -> state`, which donates the state.

    The dropout key of a step is derived from `key` and the step number. `schedule` is the learning-rate schedule, a
    `jax.tree_util.Partial` whose numbers are inputs of the compiled step, see `make_optimizer`.

    `grad_accum_steps` is the number of micro-batches per step. It does not change the gradient, except for rounding and
    dropout, because the losses are divided by the denominators of the whole batch. With `head_only`, as in the first
    `config.optimizer.head_steps` steps, the encoder has gradients of 0 and no updates.
    """
    if grad_accum_steps > 1 and not objective.splits_into_micro_batches:
        reason = "because the loss of a row depends on other rows of its batch"
        raise UsageError(f"config.grad_accum_steps={grad_accum_steps} is not supported, {reason}; use 1")
    state_shapes = abstract_state(objective, optimizer, mesh)
    if head_only and trainable_shapes(state_shapes.params, optimizer.config).keys() == {ENCODER}:
        raise UsageError("config.optimizer.head_steps would train nothing: only the encoder is trainable; use 0")

    def train_step(state: TrainState, batch: Batch, key: jax.Array, schedule: optax.Schedule) -> TrainState:
        trainable, frozen = split_frozen(state.params, optimizer.config)
        denominators = objective.denominators(batch)
        # In head steps, the encoder stays in `trainable`, because the optimizer state contains its moments. The loss
        # and the new parameters use `fixed` instead, so that its gradients are 0 and weight decay does not change it.
        fixed = {ENCODER: trainable[ENCODER]} if head_only and ENCODER in trainable else {}

        def loss_fn(trained: Any, micro_batch: Batch, dropout_key: jax.Array) -> tuple[Any, MetricSums]:
            sums, _ = objective.compute(merge_frozen({**trained, **fixed}, frozen), micro_batch, dropout_key)
            losses = (factor * sums[name][0] / denominators[name] for name, factor in objective.loss_weights.items())
            return sum(losses), sums

        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        if grad_accum_steps > 1:
            grad_fn = accumulate(grad_fn, grad_accum_steps)
        (loss, sums), grads = grad_fn(trainable, batch, jax.random.fold_in(key, state.step))

        updates, opt_state = optimizer.tx.update(grads, state.opt_state, trainable)
        rate: Any = schedule(state.step)  # `tx` does not scale updates by the rate, and does not negate them.
        new_trainable: Any = optax.tree.add_scale(trainable, -rate, updates)  # trainable - rate * updates

        grad_norm = optax.tree.norm(grads)  # before clipping
        is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        sums = {**sums, "grad_norm": jnp.stack([grad_norm, jnp.ones(())]), **non_padding_sums(batch)}
        return state.replace(
            step=state.step + 1,
            params=restack_frozen({**new_trainable, **fixed}, frozen),
            opt_state=opt_state,
            sums=jax.tree.map(jnp.add, state.sums, sums),
            bad_step=jnp.where(~is_finite & (state.bad_step < 0), state.step + 1, state.bad_step),
        )

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes)
    return jax.jit(
        under_mesh(train_step, mesh),
        in_shardings=(shardings, batch_sharding(mesh), replicated(mesh), replicated(mesh)),
        out_shardings=shardings,
        donate_argnums=0,
        compiler_options=compiler_options(mesh),  # On TPU, overlap collectives with compute.
    )


def accumulate(grad_fn: Callable[..., Any], num_micro_batches: int) -> Callable[..., Any]:
    """Wraps `grad_fn(params, batch, key) -> ((loss, sums), gradients)` to add up the results of micro-batches."""

    def accumulated(params: Any, batch: Batch, key: jax.Array) -> Any:
        # [B, ...] -> [B / n, n, ...] -> [n, B / n, ...], for n micro-batches. Row r goes to micro-batch r % n, so that
        # axis B / n has the sharding of B, and no row moves to another device.
        micro_batches = jax.tree.map(lambda x: x.reshape(-1, num_micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total: Any, xs: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            micro_batch, index = xs
            return jax.tree.map(jnp.add, total, grad_fn(params, micro_batch, jax.random.fold_in(key, index))), None

        # Start from zeros instead of the results of the first micro-batch, so that `grad_fn` is compiled only once, in
        # the scan. XLA shards the zeros like the outputs of `grad_fn`.
        shapes = jax.eval_shape(grad_fn, params, jax.tree.map(lambda x: x[0], micro_batches), key)
        zeros = jax.tree.map(jnp.zeros_like, shapes)
        return jax.lax.scan(add, zeros, (micro_batches, jnp.arange(num_micro_batches)))[0]

    return accumulated


@functools.cache
def make_eval_step(objective: Objective, mesh: Mesh) -> Callable[[Any, Batch, MetricSums], tuple[MetricSums, Outputs]]:
    """Returns the jitted evaluation step `(params, batch, sums) -> (updated sums, outputs of the global batch)`."""

    def eval_step(params: Any, batch: Batch, sums: MetricSums) -> tuple[MetricSums, Outputs]:
        batch_sums, outputs = objective.compute(params, batch, None)
        return jax.tree.map(jnp.add, sums, batch_sums), outputs

    return jax.jit(under_mesh(eval_step, mesh), out_shardings=replicated(mesh))


def metric_means(sums: MetricSums, loss_weights: Mapping[str, float] | None = None) -> dict[str, float]:
    """Returns the mean of each metric, computed from its sums. Omits metrics with weight 0.

    With the `loss_weights` of an objective, also returns `loss`, the weighted sum of all losses, if there is any.
    """
    means = {name: float(total / weight) for name, (total, weight) in jax.device_get(sums).items() if weight > 0}
    losses = [factor * means[name] for name, factor in (loss_weights or {}).items() if name in means]
    return {**means, "loss": sum(losses)} if losses else means
