"""Objectives of classification, multiple choice and regression, with class weights and label smoothing."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.data.schema import EXAMPLE, SEQUENCE, ArraySpec, Schema
from bertjax.errors import UsageError, listed
from bertjax.metrics.metric import Metric, loss_metric
from bertjax.model.config import ModelConfig
from bertjax.model.models import SequenceModel
from bertjax.tasks.objectives.losses import cross_entropy, weighted_sum
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs

BALANCED = "balanced"


@dataclasses.dataclass(frozen=True)
class ClassWeighting:
    """Class weights and label smoothing of the training loss.

    Evaluation does not use them, so that the metrics of runs with different weights are comparable.
    """

    # Weight of each class by id (default: (), all weights are 1). The training loss is sum(weight * loss) / sum(weight)
    # over all labels, like PyTorch's `CrossEntropyLoss(weight=...)`.
    weights: tuple[float, ...] = ()
    # Fraction of a label's probability that is spread evenly over all classes (Szegedy et al., 2016, section 7).
    smoothing: float = 0.0

    def label_weights(self, labels: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns the class weights of `labels`, int32 [...], times `mask`, float32 [...]."""
        return mask * jnp.array(self.weights, jnp.float32)[labels] if self.weights else mask


UNWEIGHTED = ClassWeighting()


def make_class_weighting(
    class_weights: dict[str, float] | Literal["balanced"], smoothing: float, names: Sequence[str], labels: np.ndarray
) -> ClassWeighting:
    """Builds the class weighting of a run from "balanced", or from weights keyed by class name.

    For N rows of C classes, a class with n rows has the balanced weight N / (C * n), as in scikit-learn's
    `compute_class_weight`. Classes without rows have weight 1 and are not counted in C. `labels` contains the class id
    of each training row or word, -1 if unlabeled.
    """
    if class_weights == BALANCED:
        counts = np.bincount(labels[labels >= 0], minlength=len(names))
        mean = counts.sum() / max(1, np.count_nonzero(counts))
        return ClassWeighting(tuple(float(mean / count) if count else 1.0 for count in counts), smoothing)
    if unknown := [name for name in class_weights if name not in names]:
        raise UsageError(f"unknown class in config.data.class_weights: {unknown[0]!r}; use one of {listed(names, 20)}")
    weights = tuple(float(class_weights.get(name, 1.0)) for name in names) if class_weights else ()
    return ClassWeighting(weights, smoothing)


@dataclasses.dataclass(frozen=True)
class LabelObjective(Objective):
    """Objective that predicts a class or choice for each example. For other labels, subclasses override `losses`.

    Batches have `labels` int32 [B]. Unknown labels are -1 or NaN.
    """

    accuracy: ClassVar[str] = "accuracy"  # name of the accuracy metric ("": none)
    metrics = (loss_metric("cross_entropy"), Metric("accuracy"))
    label_spec = ArraySpec("labels", (), num_values="classes")
    weighting: ClassWeighting = UNWEIGHTED  # class weights and label smoothing
    sequences: Schema = SEQUENCE  # specifications of the batch arrays that contain the encoded sequences

    @property
    def schema(self) -> Schema:
        return (*self.sequences, self.label_spec, *EXAMPLE)

    def losses(self, logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
        """Returns the loss of each label (default: cross-entropy [...] of logits [..., C] and smoothed labels)."""
        losses = cross_entropy(logits, labels)
        if not smoothing:
            return losses
        uniform = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
        return (1 - smoothing) * losses + smoothing * uniform

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the total weight of the known labels of a batch, or 1 if no label is known."""
        total = jnp.sum(self.weighting.label_weights(*self._labels_and_mask(batch)))
        return {self.metrics[0].name: jnp.where(total > 0, total, 1.0)}

    def compute(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        logits = self.apply(params, batch, dropout_key)
        weighting = UNWEIGHTED if dropout_key is None else self.weighting
        labels, mask = self._labels_and_mask(batch)
        losses = self.losses(logits, labels, weighting.smoothing)
        sums = {self.metrics[0].name: weighted_sum(losses, weighting.label_weights(labels, mask))}
        if self.accuracy:  # logits [..., C], labels [...]
            sums[self.accuracy] = weighted_sum(jnp.argmax(logits, axis=-1) == labels, mask)
        return sums, {"example": batch["example"], "logits": logits}

    def _labels_and_mask(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns the labels and their weights, float32 with the shape of the labels. Both are 0 for unknown labels."""
        labels, weights = batch[self.label_spec.name], batch["weights"]
        if jnp.issubdtype(labels.dtype, jnp.floating):
            known, labels = jnp.isfinite(labels), jnp.nan_to_num(labels)
        else:
            known, labels = labels >= 0, jnp.maximum(labels, 0)
        # Weights are [B], or [B, K] if K examples share a row. Broadcast them over the remaining axes of `labels`.
        weights = weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim))
        return labels, known * weights


@dataclasses.dataclass(frozen=True)
class MultiLabel(LabelObjective):
    """Objective that predicts each of K labels per example. Batches have `labels` int32 [B, K], 0 or 1, -1 if unknown.

    The loss is the mean sigmoid cross-entropy over examples and labels, like PyTorch's `BCEWithLogitsLoss`.
    """

    accuracy = ""
    metrics = (loss_metric("binary_cross_entropy"),)
    label_spec = ArraySpec("labels", ("labels",), num_values="two")

    def losses(self, logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
        return jax.nn.softplus(logits) - logits * labels


@dataclasses.dataclass(frozen=True)
class Regression(LabelObjective):
    """Objective that predicts one number per example. Batches have `labels` float32 [B], NaN if unknown."""

    accuracy = ""
    metrics = (loss_metric("squared_error"),)
    label_spec = ArraySpec("labels", (), "float32")

    def apply(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> jax.Array:
        return super().apply(params, batch, dropout_key)[..., 0]

    def losses(self, logits: jax.Array, labels: jax.Array, smoothing: float) -> jax.Array:
        return jnp.square(logits - labels)


def sequence_objective(
    names: Sequence[str], model: ModelConfig, weighting: ClassWeighting = UNWEIGHTED
) -> LabelObjective:
    """Builds a classification objective for the classes `names`, or a regression objective if `names` is empty."""
    return LabelObjective(SequenceModel(model, len(names)), weighting) if names else Regression(SequenceModel(model, 1))
