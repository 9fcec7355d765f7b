"""How much the rows of each class count in training, and how sure of a label a model is to become."""

import dataclasses
import json
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from bertjax.errors import UsageError

_BALANCED = "balanced"
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
        logarithm = jax.nn.logsumexp(logits, axis=-1)
        losses = logarithm - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        if not self.smoothing:
            return losses
        return (1 - self.smoothing) * losses + self.smoothing * (logarithm - jnp.mean(logits, axis=-1))


PLAIN = Weighting()


def check(config: ConfigDict) -> None:
    """Refuses values no run can start with; whether the names are those of classes, the data must tell.

    Raises:
      UsageError: names the field and its value.
    """
    if not 0 <= config.label_smoothing < 1:
        raise UsageError(f"config.label_smoothing is {config.label_smoothing}; it must be at least 0 and below 1")
    _given(config)


def refuse(config: ConfigDict, why: str, *names: str) -> None:
    """Refuses settings that a task does nothing with.

    Args:
      why: what the task has instead, for the user.
      names: of those of `label_smoothing` and `data.class_weights` that make no sense.

    Raises:
      UsageError: one of them is given.
    """
    values = {"label_smoothing": config.label_smoothing, "data.class_weights": config.data.class_weights}
    for name in names:
        if values[name]:
            raise UsageError(f"config.{name} is {values[name]!r}, and {why}; leave it out")


def weighting_of(config: ConfigDict, labels: Sequence[str], found: np.ndarray) -> Weighting:
    """The weighting of a config.

    Args:
      labels: names of the classes, the index is the id.
      found: the label of each training row or word, -1 where it has none. `balanced` gives a class the inverse of its
        share of them: N / (classes that are there * its rows), as scikit-learn's `compute_class_weight`; 1 where it has
        none.

    Raises:
      UsageError: a weight is given for what is no class.
    """
    given = _given(config)
    if given == _BALANCED:
        counts = np.bincount(found[found >= 0], minlength=len(labels))
        each = counts.sum() / max(1, np.count_nonzero(counts))
        weights = tuple(float(each / count) if count else 1.0 for count in counts)
    else:
        unknown = [name for name in given if name not in labels]
        if unknown:
            known = ", ".join(labels[:_SHOWN]) + (", ..." if len(labels) > _SHOWN else "")
            raise UsageError(f"config.data.class_weights names {unknown[0]!r}; the classes are {known}")
        weights = tuple(float(given.get(name, 1.0)) for name in labels) if given else ()
    return Weighting(weights, float(config.label_smoothing))


def _given(config: ConfigDict) -> dict[str, float] | str:
    text = config.data.class_weights
    if text in ("", _BALANCED):
        return text or {}
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError
        if not all(type(value) in (int, float) and 0 < value < math.inf for value in given.values()):
            raise ValueError
    except (ValueError, RecursionError):
        raise UsageError(
            f"config.data.class_weights is {text[:100]!r}; give {_BALANCED}, or a weight above 0 for the classes that "
            """have not 1, as JSON: '{"rare": 5, "usual": 0.5}'"""
        ) from None
    return given
