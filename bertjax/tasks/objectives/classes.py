"""Objectives of output layers: classes, choices, labels and numbers; those of spans and tags stand with their tasks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.data.schema import EXAMPLE, SEQUENCE, ArraySpec, Schema
from bertjax.model.config import ModelConfig
from bertjax.model.heads import SequenceModel
from bertjax.tasks.finetuning.weighting import PLAIN, Weighting
from bertjax.tasks.objectives.losses import apply, weighted
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs

LABEL, NUMBER = ArraySpec("labels", (), below="classes"), ArraySpec("labels", (), "float32")
LABELS = ArraySpec("labels", ("labels",), below="two")


def classes_objective(model: nn.Module, weighting: Weighting = PLAIN, rows: Schema = SEQUENCE) -> Objective:
    """One of several classes, or choices, for each example: batches have `labels` int32 [B], -1 where unknown.

    Args:
      model: gives logits [B, classes].
      weighting: of the classes.
      rows: CHOICES where a row has a sequence of each.
    """
    return Objective(
        model,
        ("cross_entropy", "accuracy"),
        ("cross_entropy",),
        ClassWeights(weighting),
        Classes(weighting),
        (*rows, LABEL, *EXAMPLE),
    )


def labels_objective(model: nn.Module) -> Objective:
    """Any number of K labels for each example: batches have `labels` int32 [B, K], 0 or 1, -1 where unknown.

    The loss is the mean of the sigmoid cross-entropies over examples and labels, as `BCEWithLogitsLoss` of PyTorch.
    """
    names = ("binary_cross_entropy",)
    return Objective(model, names, names, _multilabelled, _judge, (*SEQUENCE, LABELS, *EXAMPLE))


def regression_objective(model: nn.Module) -> Objective:
    """A number for each example: batches have `labels` float32 [B], NaN where unknown."""
    return Objective(model, ("squared_error",), ("squared_error",), _valued, _regress, (*SEQUENCE, NUMBER, *EXAMPLE))


def sequence_objective(labels: Sequence[str], model: ModelConfig, weighting: Weighting = PLAIN) -> Objective:
    """Cross-entropy over the classes of a row, or squared error where there are none."""
    if labels:
        return classes_objective(SequenceModel(model, len(labels)), weighting)
    return regression_objective(SequenceModel(model, 1))


# Classes rather than closures: an objective is compared by value.
@dataclasses.dataclass(frozen=True)
class ClassWeights:
    """The weight of a batch in training: that of the labels it has, in an array of any shape."""

    weighting: Weighting
    labels: str = "labels"

    def __call__(self, batch: Batch) -> dict[str, jax.Array]:
        labels = batch[self.labels]
        total = jnp.sum(self.weighting.of_labels(jnp.maximum(labels, 0), known(labels, batch["weights"])))
        return {"cross_entropy": jnp.where(total > 0, total, 1.0)}


@dataclasses.dataclass(frozen=True)
class Classes:
    """Classes of rows from a batch."""

    weighting: Weighting

    def __call__(
        self, model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[MetricSums, Outputs]:
        logits = apply(model, params, batch, dropout_key)
        weighting = PLAIN if dropout_key is None else self.weighting
        cross_entropy, accuracy, _ = class_sums(logits, batch["labels"], batch["weights"], weighting)
        sums = {"cross_entropy": cross_entropy, "accuracy": accuracy}
        return sums, {"example": batch["example"], "logits": logits}


def class_sums(
    logits: jax.Array, labels: jax.Array, weights: jax.Array, weighting: Weighting
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sum and weight of cross-entropy and of accuracy, and the classes predicted.

    Args:
      logits: float32 [B, ..., C].
      labels: int32 [B, ...], -1 where unknown.
      weights: float32 [B], or [B, K] where K examples share a row, 0 for padding.
    """
    there = known(labels, weights)
    labels = jnp.maximum(labels, 0)
    losses, counted = weighting.losses(logits, labels), weighting.of_labels(labels, there)
    predicted = jnp.argmax(logits, axis=-1)
    return weighted(losses, counted), weighted(predicted == labels, there), predicted


def known(labels: jax.Array, weights: jax.Array) -> jax.Array:
    """float32 like the labels: the weight of a row, or of an example in it, where there is a label, else 0."""
    there = jnp.isfinite(labels) if jnp.issubdtype(labels.dtype, jnp.floating) else labels >= 0
    return there * weights.reshape(weights.shape + (1,) * (labels.ndim - weights.ndim))


def _valued(batch: Batch) -> dict[str, jax.Array]:
    return {"squared_error": jnp.maximum(jnp.sum(known(batch["labels"], batch["weights"])), 1.0)}


def _regress(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
    values, weights = apply(model, params, batch, dropout_key)[..., 0], known(batch["labels"], batch["weights"])
    errors = jnp.square(values - jnp.nan_to_num(batch["labels"]))
    sums = {"squared_error": weighted(errors, weights)}
    return sums, {"example": batch["example"], "logits": values}


def _multilabelled(batch: Batch) -> dict[str, jax.Array]:
    return {"binary_cross_entropy": jnp.maximum(jnp.sum(known(batch["labels"], batch["weights"])), 1.0)}


def _judge(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
    logits, weights = apply(model, params, batch, dropout_key), known(batch["labels"], batch["weights"])  # [B, K]
    losses = jax.nn.softplus(logits) - logits * jnp.maximum(batch["labels"], 0)
    sums = {"binary_cross_entropy": weighted(losses, weights)}
    return sums, {"example": batch["example"], "logits": logits}
