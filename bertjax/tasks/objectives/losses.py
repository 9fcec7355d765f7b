"""Loss functions and metric sums that objectives share."""

import jax
import jax.numpy as jnp


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
    # Avoid `argmax`: if the vocabulary is sharded, XLA would all-gather an index array as large as the logits.
    classes = jnp.arange(logits.shape[-1])
    maximum = jnp.max(logits, axis=-1, keepdims=True)
    correct = jnp.min(jnp.where(logits == maximum, classes, classes.size), axis=-1) == labels
    return weighted_sum(cross_entropy(logits, labels), weights), weighted_sum(correct, weights)
