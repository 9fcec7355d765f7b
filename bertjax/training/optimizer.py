"""Optimizers (BERT's Adam, AdamW, StableAdamW, LAMB, Muon), layer-wise learning-rate decay, and schedules.

Defaults and schedule follow google-research/bert `optimization.py`. Gradients are clipped to global norm 1.0. Adam has
no bias correction, and its eps is 1e-6. Weight decay 0.01 is decoupled and skips LayerNorm and biases. The learning
rate of update s, counted from 0, is `peak * s / warmup` during warm-up. After that, it is `peak * (1 - s / steps)`. So
the first update has rate 0, and the rate drops at the end of warm-up.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from bertjax.config.optimizer import OptimizerConfig
from bertjax.errors import UsageError
from bertjax.model.encoder import ENCODER
from bertjax.model.layers import is_stacked

# Root mean square of Muon's updates.
_MUON_RMS = 0.2


def make_schedule(
    config: OptimizerConfig, warmup_steps: int, phase_schedule: Sequence[tuple[int, float]]
) -> optax.Schedule:
    """Builds the learning-rate schedule of a run. The first `config.head_steps` steps have their own warmup and decay.

    `phase_schedule` contains (stop step, peak rate) of each phase. The last stop step is the number of steps.
    """
    stops, peaks = zip(*phase_schedule, strict=True)
    head_steps, total_steps = config.head_steps, stops[-1]
    steps = total_steps - head_steps
    if head_steps and steps <= 0:
        message = f"config.optimizer.head_steps={head_steps} must be below the number of steps, {total_steps}"
        raise UsageError(f"{message}; to train only the head, set config.optimizer.freeze=encoder")
    decay_steps = steps // 10 if config.decay_steps < 0 else config.decay_steps
    relative = {
        "bert": bert_schedule(1.0, warmup_steps, steps),
        "cosine": jax.tree_util.Partial(_warmup_then_cosine, warmup_steps, steps),
        "warmup_stable_decay": jax.tree_util.Partial(_warmup_stable_decay, warmup_steps, decay_steps, steps),
    }[config.schedule]
    starts = np.array(stops[:-1], np.int32) - head_steps
    schedule = jax.tree_util.Partial(_with_peaks, starts, np.array(peaks, np.float32), relative)
    head = bert_schedule(config.head_learning_rate, head_steps // 10, head_steps)
    return jax.tree_util.Partial(_head_first, head_steps, head, schedule) if head_steps else schedule


def _with_peaks(starts: jax.Array, peaks: jax.Array, relative: Any, step: jax.Array) -> jax.Array:
    return jnp.asarray(peaks)[jnp.sum(step >= starts)] * relative(step)


def _head_first(head_steps: jax.Array, head_schedule: Any, schedule: Any, step: jax.Array) -> jax.Array:
    return jnp.where(step < head_steps, head_schedule(step), schedule(step - head_steps))


def describe_head_steps(config: OptimizerConfig) -> list[str]:
    """Returns a list with a log line about the steps that train only the head ([]: no such steps)."""
    rate = f"{config.head_learning_rate:g}"
    line = f"steps 0 to {config.head_steps:,} train only the parameters outside the encoder, at learning rate {rate}"
    return [line] if config.head_steps else []


def bert_schedule(peak: float, warmup_steps: int, total_steps: int) -> optax.Schedule:
    """Returns the schedule `peak * s / warmup_steps` for steps `s` of warm-up, then `peak * (1 - s / total_steps)`."""
    return jax.tree_util.Partial(_warmup_then_decay, peak, warmup_steps, total_steps)


def _warmup_then_decay(peak: jax.Array, warmup_steps: jax.Array, total_steps: jax.Array, step: jax.Array) -> jax.Array:
    warmup = step / jnp.maximum(warmup_steps, 1)
    decay = 1.0 - jnp.minimum(step, total_steps) / total_steps
    return peak * jnp.where(step < warmup_steps, warmup, decay)


def _warmup_then_cosine(warmup_steps: jax.Array, total_steps: jax.Array, step: jax.Array) -> jax.Array:
    warmup = step / jnp.maximum(warmup_steps, 1)
    fraction = jnp.clip((step - warmup_steps) / jnp.maximum(total_steps - warmup_steps, 1), 0, 1)
    return jnp.where(step < warmup_steps, warmup, (1 + jnp.cos(jnp.pi * fraction)) / 2)


def _warmup_stable_decay(
    warmup_steps: jax.Array, decay_steps: jax.Array, total_steps: jax.Array, step: jax.Array
) -> jax.Array:
    warmup = jnp.where(step < warmup_steps, step / jnp.maximum(warmup_steps, 1), 1.0)
    fraction = jnp.clip((step - (total_steps - decay_steps)) / jnp.maximum(decay_steps, 1), 0, 1)
    return jnp.minimum(warmup, 1 - jnp.sqrt(fraction))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by min(1, max_norm / norm), as `tf.clip_by_global_norm` does.

    XLA fuses this factor with the update of the moments. It does not fuse `optax.clip_by_global_norm`, which selects
    the original or the scaled gradients. On two CPU cores, an update of BERT-base takes 0.09 s instead of 0.13 s.
    """

    def scale(updates: optax.Updates, _params: optax.Params | None) -> optax.Updates:
        factor = max_norm / jnp.maximum(optax.tree.norm(updates), max_norm)
        return jax.tree.map(lambda update: update * factor, updates)

    return optax.stateless(scale)


class BertAdamState(NamedTuple):
    """First and second moments, each shaped like the parameters."""

    mu: optax.Updates
    nu: optax.Updates


def scale_by_bert_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Rescales updates as Adam does, but without bias correction: m / (sqrt(v) + eps)."""

    def init(params: optax.Params) -> BertAdamState:
        return BertAdamState(jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, BertAdamState]:
        del params
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, updates)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu), BertAdamState(mu, nu)

    return optax.GradientTransformation(init, update)


def scale_by_muon(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Orthogonalizes updates of the layers' kernels with Muon, layer by layer, and rescales other updates with Adam.

    The root mean square of a kernel's update is 0.2, as is typical of Adam, so that all can share a learning rate.
    """

    def first_output(names: Sequence[str]) -> int:
        # A kernel is [N, in, out], [N, D, H, K] with heads or, in the output of attention, [N, H, K, D].
        return 3 if names[-3:] == ["attention", "output", "kernel"] else 2

    def dimension_numbers(names: Sequence[str], kernel: jax.Array) -> optax.contrib.MuonDimensionNumbers:
        first = first_output(names)
        return optax.contrib.MuonDimensionNumbers(range(1, first), range(first, kernel.ndim))

    def scale(names: Sequence[str], update: jax.Array) -> jax.Array:
        first = first_output(names)
        size = max(math.prod(update.shape[1:first]), math.prod(update.shape[first:]))
        return update * (_MUON_RMS * math.sqrt(size))

    def rule(names: Sequence[str], _: jax.Array) -> str:
        return "muon" if is_stacked(names) and names[-1] == "kernel" else "adamw"

    muon = optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=lambda tree: _map_with_names(dimension_numbers, tree)),
        optax.stateless(lambda updates, _: _map_with_names(scale, updates)),
    )
    rules: dict[Any, optax.GradientTransformation] = {"muon": muon, "adamw": optax.scale_by_adam(b1, b2, eps)}
    return optax.partition(rules, lambda params: _map_with_names(rule, nn.unbox(params)))


def divide_by_gradient_rms(adamw: optax.GradientTransformation, b2: float, eps: float) -> optax.GradientTransformation:
    """Changes AdamW to StableAdamW (arXiv 2304.13013, Algorithm 2).

    Divides the updates, per array and layer, by max(1, RMS). RMS is the root of the mean of g^2 / max(v, eps^2), where
    g is the gradient and v is its bias-corrected second moment.
    """

    def update(updates: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, Any]:
        scaled, new_state = adamw.update(updates, state, params)
        second_moments, count = optax.tree.get(new_state, "nu"), optax.tree.get(new_state, "count")
        correction = 1 - b2**count

        def divide(names: Sequence[str], update: jax.Array, gradient: jax.Array, nu: jax.Array) -> jax.Array:
            squares = jnp.square(gradient) / jnp.maximum(nu / correction, eps**2)
            rms = jnp.sqrt(jnp.mean(squares, _axes_of_one_array(names, update), keepdims=True))
            return update / jnp.maximum(1, rms)

        return _map_with_names(divide, scaled, updates, second_moments), new_state

    return optax.GradientTransformation(adamw.init, update)


def decay_mask(params: optax.Params, untrained_modules: tuple[str, ...] = ()) -> optax.Params:
    """Returns a tree that is True for parameters with weight decay.

    These are all parameters except biases, LayerNorm scales and the top-level `untrained_modules`. Gradients of these
    modules are 0, so weight decay alone would shrink them.
    """

    # Select biases and scales by name, not by rank, because stacked biases have rank 2.
    def has_decay(names: Sequence[str], _: Any) -> bool:
        return names[-1] not in ("bias", "scale") and names[0] not in untrained_modules

    return _map_with_names(has_decay, params)


def scale_by_layer_trust_ratio() -> optax.GradientTransformation:
    """Scales updates by LAMB's ratio |w| / |update| (arXiv 1904.00962, Algorithm 2, with the identity for phi).

    Each array of each layer has its own ratio. `optax.scale_by_trust_ratio` would use one ratio for all layers.
    The ratio is 1 if either norm is 0, as in the authors' code.
    """

    def scale(names: Sequence[str], update: jax.Array, param: jax.Array) -> jax.Array:
        axes = _axes_of_one_array(names, update)
        weight, change = (jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True)) for x in (param, update))
        return update * jnp.where((weight > 0) & (change > 0), weight / jnp.where(change > 0, change, 1), 1)

    return optax.stateless(lambda updates, params: _map_with_names(scale, updates, params))


def scale_by_layer_decay(decay: float, frozen_layers: int) -> optax.GradientTransformation:
    """Scales updates by `decay` to the power of the distance from the output layer, as in BEiT (arXiv 2106.08254).

    The factor is `decay` for the highest layer, `decay^N` for the lowest of N layers, `decay^(N + 1)` for the
    embeddings, and 1 above the layers. `frozen_layers` is the number of lowest layers that are frozen and have
    no updates.
    """

    def scale_all(updates: optax.Updates, _params: optax.Params | None) -> optax.Updates:
        depths = _map_with_names(lambda names, leaf: len(leaf) if is_stacked(names) else 0, updates)
        num_trained = max(jax.tree.leaves(depths), default=0)

        def scale(names: Sequence[str], update: jax.Array) -> jax.Array:
            if is_stacked(names):
                factors = decay ** np.arange(num_trained, 0, -1, dtype=np.float32)
                return update * factors.reshape(-1, *[1] * (update.ndim - 1))
            is_embedding = names[0] == ENCODER and "embeddings" in names
            return update * decay ** (num_trained + frozen_layers + 1) if is_embedding else update

        return _map_with_names(scale, updates)

    return optax.stateless(scale_all)


def _map_with_names(function: Callable[..., Any], *trees: Any) -> optax.Params:
    """Maps `function(names, *leaves)` over trees. `names` contains the dictionary keys on the path to the leaves."""

    def named(path: tuple, *leaves: jax.Array) -> Any:
        return function([entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)], *leaves)

    return jax.tree_util.tree_map_with_path(named, *trees)


def _axes_of_one_array(names: Sequence[str], leaf: jax.Array) -> tuple[int, ...]:
    """Returns all axes of a parameter except the layer axis."""
    return tuple(range(1 if is_stacked(names) else 0, leaf.ndim))


class Optimizer(NamedTuple):
    """Optax transformation `tx` of the trainable parameters, and its config without the learning-rate schedule.

    The train step multiplies the updates of `tx` by the learning rate.
    """

    config: OptimizerConfig
    tx: optax.GradientTransformation


@functools.cache
def make_optimizer(config: OptimizerConfig, untrained_modules: tuple[str, ...] = ()) -> Optimizer:
    """Builds the optimizer, without the learning-rate schedule, which is an argument of the train step.

    `untrained_modules` is `Objective.untrained_modules`.

    Returns the same object for configs that differ only in the schedule. The optimizer is a part of the cache key of
    `make_train_step`, so the trials of a sweep reuse one compiled train step.
    """
    rates = {"learning_rate": 0.0, "head_learning_rate": 0.0}
    steps = {"warmup_steps": 0, "decay_steps": -1, "head_steps": 0}
    normalized = dataclasses.replace(config, schedule="bert", **rates, **steps)
    if config != normalized:
        return make_optimizer(normalized, untrained_modules)
    scale_by_adam = {"bert_adam": scale_by_bert_adam, "muon": scale_by_muon}.get(config.name, optax.scale_by_adam)
    has_layer_decay = config.layer_decay < 1
    rules = [
        scale_by_adam(config.b1, config.b2, config.eps),
        optax.add_decayed_weights(
            config.weight_decay, mask=functools.partial(decay_mask, untrained_modules=untrained_modules)
        ),
    ]
    if config.name == "stable_adamw":
        rules = [divide_by_gradient_rms(optax.chain(*rules), config.b2, config.eps)]
    # The position of each transformation is a part of the paths in checkpoints, such as `opt_state/1/mu`.
    tx = optax.chain(
        clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        *rules,
        scale_by_layer_trust_ratio() if config.name == "lamb" else optax.identity(),
        scale_by_layer_decay(config.layer_decay, config.freeze_layers) if has_layer_decay else optax.identity(),
    )
    return Optimizer(config, tx)
