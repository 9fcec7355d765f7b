"""Loss functions and metric sums that objectives share."""

import jax
import jax.numpy as jnp

from bertjax.metrics.metric import Metric, loss_metric
from bertjax.model.heads import first_maximum


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy in nats, float32 [...], of logits [..., C] and labels [...] in [0, C)."""
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def weighted_sum(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns metric sums, float32 [2]: the weighted sum of the values, and the sum of the weights."""
    return jnp.stack([jnp.sum(values * weights), jnp.sum(weights)])


def loss_and_accuracy_metrics(prefix: str, title: str) -> tuple[Metric, Metric]:
    """Returns the metrics that `loss_and_accuracy` computes. Their panel titles start with `title`."""
    return loss_metric(f"{prefix}_loss", f"{title}: loss"), Metric(f"{prefix}_accuracy", panel=f"{title}: accuracy")


def loss_and_accuracy(prefix: str, logits: jax.Array, labels: jax.Array, weights: jax.Array) -> dict[str, jax.Array]:
    """Returns the metric sums `{prefix}_loss` (cross-entropy) and `{prefix}_accuracy`.

    `logits` is float32 [..., C]. `labels` contains class ids, int32 [...]. `weights` is float32 [...].
    """
    return {
        f"{prefix}_loss": weighted_sum(cross_entropy(logits, labels), weights),
        f"{prefix}_accuracy": weighted_sum(first_maximum(logits) == labels, weights),
    }
