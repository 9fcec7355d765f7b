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


def loss_and_accuracy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """float32 logits [..., C], labels and weights [...] to metric sums of cross-entropy and accuracy."""
    # The first of the largest, as `argmax`, for which XLA moves as many indices between devices as there are logits.
    pieces = jnp.arange(logits.shape[-1])
    largest = jnp.max(logits, axis=-1, keepdims=True)
    correct = jnp.min(jnp.where(logits == largest, pieces, pieces.size), axis=-1) == labels
    return weighted(cross_entropy(logits, labels), weights), weighted(correct, weights)
