"""What objectives add up: cross-entropies and what goes with them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.tasks.task import Batch


def apply(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> Any:
    """What the model gives for a batch; with dropout where there is a key."""
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    return model.apply({"params": params}, batch, deterministic=dropout_key is None, rngs=rngs)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Nats, float32 [...], of logits [..., C] against labels [...] of at least 0."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def weighted(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Metric sums, float32 [2]: of values by their weights, and of the weights."""
    return jnp.stack([jnp.sum(values * weights), jnp.sum(weights)])
