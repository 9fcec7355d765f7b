"""Loss functions and metric sums that objectives share."""

import jax
import jax.numpy as jnp

from bertjax.model.heads import first_maximum


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy in nats, float32 [...], of logits [..., C] and labels [...] in [0, C)."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns metric sums, float32 [2]: the weighted sum of the values, and the sum of the weights."""
    return jnp.stack([jnp.sum(values * weights), jnp.sum(weights)])


def loss_and_accuracy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the metric sums of cross-entropy and accuracy.

    `logits` is float32 [..., C]. `labels` contains class ids, int32 [...]. `weights` is float32 [...].
    """
    return weighted_sum(cross_entropy(logits, labels), weights), weighted_sum(first_maximum(logits) == labels, weights)
