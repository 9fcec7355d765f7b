"""Class weights and label smoothing for training."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.errors import UsageError, listed
from bertjax.tasks.losses import cross_entropy

BALANCED = "balanced"


@dataclasses.dataclass(frozen=True)
class ClassWeighting:
    """Class weights and label smoothing; evaluation ignores both, so that its metrics compare between settings.

    Attributes:
      weights: weight of each class by id (default: (), 1 for each). The loss is sum(weight * loss) / sum(weight) over
        the labels, as PyTorch's `CrossEntropyLoss(weight=...)`.
      smoothing: share of a label's probability that is spread evenly over all classes (Szegedy et al., 2016, section
        7).
    """

    weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    def label_weights(self, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns float32 [...], the class weights of int32 labels [...] times the mask."""
        return mask * jnp.array(self.weights, jnp.float32)[labels] if self.weights else mask

    def losses(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Returns the cross-entropy [...] of logits [..., C] against smoothed labels [...]."""
        losses = cross_entropy(logits, labels)
        if not self.smoothing:
            return losses
        uniform = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
        return (1 - self.smoothing) * losses + self.smoothing * uniform


UNWEIGHTED = ClassWeighting()


def make_class_weighting(
    class_weights: dict[str, float] | str, smoothing: float, names: Sequence[str], labels: np.ndarray
) -> ClassWeighting:
    """Builds the weighting of a run.

    Args:
      class_weights: class name -> weight, or "balanced": N / (number of classes that occur * rows of the class), as
        scikit-learn's `compute_class_weight`, and 1 for a class that does not occur.
      smoothing: label smoothing.
      names: names of the classes by id.
      labels: label of each training row or word, -1 if unlabeled.
    """
    if class_weights == BALANCED:
        counts = np.bincount(labels[labels >= 0], minlength=len(names))
        mean = counts.sum() / max(1, np.count_nonzero(counts))
        return ClassWeighting(tuple(float(mean / count) if count else 1.0 for count in counts), smoothing)
    if unknown := [name for name in class_weights if name not in names]:
        raise UsageError(f"unknown class in config.data.class_weights: {unknown[0]!r}; known: {listed(names, 20)}")
    weights = tuple(float(class_weights.get(name, 1.0)) for name in names) if class_weights else ()
    return ClassWeighting(weights, smoothing)
