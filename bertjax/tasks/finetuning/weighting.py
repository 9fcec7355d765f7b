"""How much the rows of each class count in training, and how sure of a label a model is to become."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.errors import UsageError
from bertjax.tasks.finetuning.settings import BALANCED, FinetuningConfig
from bertjax.tasks.objectives.losses import cross_entropy

_SHOWN = 20


@dataclasses.dataclass(frozen=True)
class Weighting:
    """What training makes of classes; evaluation never does, so that its numbers compare between settings.

    Attributes:
      weights: of the classes, by id; () is 1 for each. The loss is the mean of the rows' losses by the weights of their
        labels: sum(weight * loss) / sum(weight), as `CrossEntropyLoss(weight=...)` of PyTorch.
      smoothing: share of a label's probability that is spread evenly over all classes, it too (Szegedy et al., 2016,
        section 7).
    """

    weights: tuple[float, ...] = ()
    smoothing: float = 0.0

    def of_labels(self, labels: jax.Array, known: jax.Array) -> jax.Array:
        """float32 [...], the weight of each label that is known, else 0; `labels` int32 [...] of at least 0."""
        return known * jnp.array(self.weights, jnp.float32)[labels] if self.weights else known

    def losses(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Cross-entropies [...] of logits [..., C] against smoothed labels [...]."""
        losses = cross_entropy(logits, labels)
        if not self.smoothing:
            return losses
        even = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
        return (1 - self.smoothing) * losses + self.smoothing * even


PLAIN = Weighting()


def weighting_of(settings: FinetuningConfig, labels: Sequence[str], found: np.ndarray) -> Weighting:
    """The weighting that settings give.

    Args:
      labels: names of the classes, the index is the id.
      found: the label of each training row or word, -1 where it has none. `balanced` gives a class the inverse of its
        share of them: N / (classes that are there * its rows), as scikit-learn's `compute_class_weight`; 1 where it has
        none.

    Raises:
      UsageError: a weight is given for what is no class.
    """
    given = settings.data.weights_of_classes
    if given == BALANCED:
        counts = np.bincount(found[found >= 0], minlength=len(labels))
        each = counts.sum() / max(1, np.count_nonzero(counts))
        weights = tuple(float(each / count) if count else 1.0 for count in counts)
    else:
        unknown = [name for name in given if name not in labels]
        if unknown:
            known = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
            raise UsageError(f"config.data.class_weights names {unknown[0]!r}; the classes are {known}")
        weights = tuple(float(given.get(name, 1.0)) for name in labels) if given else ()
    return Weighting(weights, settings.label_smoothing)
