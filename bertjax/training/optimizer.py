"""Optimizers: BERT's own Adam to the letter, AdamW and LAMB; layers that are frozen or learn more slowly.

Facts of google-research/bert `optimization.py` that parity hangs on: gradients are clipped to global norm 1.0; Adam
has no bias correction and eps 1e-6; weight decay 0.01 is decoupled and skips LayerNorm and biases; the learning rate
of update number s, counted from 0, is `rate * s / warmup` while s < warmup and `rate * (1 - s / steps)` after, so
that the first update has rate 0 and the rate steps down where warm-up ends.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bertjax.config.optimizer import OptimizerConfig
from bertjax.training.freezing import Frozen, is_stacked

# By name and never by number of dimensions: under a scan over layers every bias has two.
_NOT_DECAYED = ("bias", "scale")


class LearningRate(NamedTuple):
    """Linear warm-up, then linear decay to 0 at `steps`; scalars, which a step takes as arguments.

    Arguments and not constants of the compiled step, so that one compilation serves every rate and length of a run.

    Attributes:
      peak: the rate that warm-up leads to.
      warmup_steps: updates of it.
      steps: of the whole run.
    """

    peak: float | jax.Array
    warmup_steps: int | jax.Array
    steps: int | jax.Array

    def at(self, step: jax.Array) -> jax.Array:
        """Update number, counted from 0, to learning rate."""
        warm = step / jnp.maximum(self.warmup_steps, 1)
        decayed = 1.0 - jnp.minimum(step, self.steps) / self.steps
        return self.peak * jnp.where(step < self.warmup_steps, warm, decayed)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales all gradients by min(1, max_norm / norm), as `tf.clip_by_global_norm` does.

    One factor is TensorFlow's formula, and XLA fuses it with the moments' update. optax's own selects between two
    arrays, which is written out first: on two CPU cores the update of BASE takes 0.13 s with it and 0.09 s with this.
    """

    def update(
        grads: optax.Updates, state: optax.EmptyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params
        factor = max_norm / jnp.maximum(optax.tree.norm(grads), max_norm)
        return jax.tree.map(lambda g: g * factor, grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class AdamState(NamedTuple):
    """First and second moments, each shaped like the parameters."""

    mu: optax.Updates
    nu: optax.Updates


def scale_by_bert_adam(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Adam without bias correction: m / (sqrt(v) + eps)."""

    def init(params: optax.Params) -> AdamState:
        return AdamState(jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))

    def update(
        grads: optax.Updates, state: AdamState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AdamState]:
        del params
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, grads)
        nu = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * jnp.square(g), state.nu, grads)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu), AdamState(mu, nu)

    return optax.GradientTransformation(init, update)


def decay_mask(params: optax.Params) -> optax.Params:
    """True where weight decay applies: everywhere but biases and LayerNorm scales."""

    return _map_named(lambda names, _: names[-1] not in _NOT_DECAYED, params)


def _map_named(function: Callable[..., Any], *trees: optax.Params) -> optax.Params:
    """Maps `function(names on the way to a leaf, leaf of each tree)`; boxes of logical axes have no name."""

    def named(path: tuple, *leaves: jax.Array) -> Any:
        return function([entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)], *leaves)

    return jax.tree_util.tree_map_with_path(named, *trees)


def scale_by_layer_trust_ratio() -> optax.GradientTransformation:
    """LAMB's ratio |w| / |update| (arXiv 1904.00962, Algorithm 2, phi the identity), one for each layer and matrix.

    A stack of layers has one a layer, over all its other axes; a matrix that is split over heads or devices has one.
    It is 1 where either norm is 0, as in the authors' code.
    """

    def scaled(names: Sequence[str], update: jax.Array, param: jax.Array) -> jax.Array:
        axes = tuple(range(1 if is_stacked(names) else 0, update.ndim))
        weight, change = (jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True)) for x in (param, update))
        return update * jnp.where((weight > 0) & (change > 0), weight / jnp.where(change > 0, change, 1), 1)

    return optax.stateless(lambda updates, params: _map_named(scaled, updates, params))


def scale_by_layer(decay: float, frozen_layers: int) -> optax.GradientTransformation:
    """Layer-wise decay of the learning rate: 1 above the layers, `decay` for the highest, `decay^N` for the lowest.

    Embeddings, which the paper counts to no layer, are one below: `decay^(N + 1)`. As in BEiT (arXiv 2106.08254);
    google-research/electra `optimization.py` leaves out a power, and so begins with `decay^2`.

    Args:
      frozen_layers: lowest ones, which are not among the parameters; layers are counted from the highest.
    """

    def update(updates: optax.Updates, params: optax.Params | None = None) -> optax.Updates:
        del params
        counts: list[int] = []
        _map_named(lambda names, leaf: counts.append(len(leaf)) if is_stacked(names) else None, updates)
        trained = max(counts, default=0)

        def scaled(names: Sequence[str], update: jax.Array) -> jax.Array:
            if is_stacked(names):
                powers = decay ** np.arange(trained, 0, -1, dtype=np.float32)
                return update * powers.reshape(-1, *[1] * (update.ndim - 1))
            is_embedding = names[0] == "encoder" and "embeddings" in names
            return update * decay ** (trained + frozen_layers + 1) if is_embedding else update

        return _map_named(scaled, updates)

    return optax.stateless(update)


class Optimizer(NamedTuple):
    """An `optax.GradientTransformation` of the parameters that are trained, and which are not."""

    init: optax.TransformInitFn
    update: optax.TransformUpdateFn
    frozen: Frozen


def make_optimizer(config: OptimizerConfig) -> Optimizer:
    """The whole update but for the learning rate, by which the train step multiplies what this returns."""
    return _make_optimizer(dataclasses.replace(config, learning_rate=1.0, warmup_steps=0))


@functools.cache
def _make_optimizer(config: OptimizerConfig) -> Optimizer:
    moments = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
    decay = {"weight_decay": config.weight_decay, "mask": decay_mask}
    if config.name == "adamw":
        update = optax.adamw(config.learning_rate, **moments, **decay)
    elif config.name == "lamb":
        # `optax.lamb` but for the ratio, which it takes over a stack as over one matrix.
        update = optax.chain(
            optax.scale_by_adam(**moments),
            optax.add_decayed_weights(**decay),
            scale_by_layer_trust_ratio(),
            optax.scale_by_learning_rate(config.learning_rate),
        )
    else:
        update = optax.chain(
            scale_by_bert_adam(**moments),
            optax.add_decayed_weights(**decay),
            optax.scale_by_learning_rate(config.learning_rate),
        )
    clip = clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    parts = [clip, update]
    if config.layer_decay < 1:
        parts.append(scale_by_layer(config.layer_decay, config.freeze_layers))
    whole = optax.chain(*parts)
    return Optimizer(whole.init, whole.update, Frozen(config.freeze_layers, config.freeze))
