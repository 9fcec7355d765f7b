"""Objectives of output layers: classes, choices and numbers; those of spans and tags stand with their tasks."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from bertjax.model.config import ModelConfig
from bertjax.model.heads import SequenceModel
from bertjax.tasks.task import Batch, Objective, Outputs, Sums


def abstract_row() -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the smallest batch a fine-tuning model takes."""
    return {name: jax.ShapeDtypeStruct((1, 8), jnp.int32) for name in ("input_ids", "input_mask", "segment_ids")}


def apply(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> jax.Array:
    """The model's logits; with dropout where there is a key."""
    rngs = {} if dropout_key is None else {"dropout": dropout_key}
    return model.apply({"params": params}, batch, deterministic=dropout_key is None, rngs=rngs)


def classes_objective(model: nn.Module) -> Objective:
    """One of several classes, or choices, for each example: batches have `labels` int32 [B], -1 where unknown."""
    return Objective(model, ("cross_entropy", "accuracy"), ("cross_entropy",), _labelled, _classify, abstract_row)


def regression_objective(model: nn.Module) -> Objective:
    """A number for each example: batches have `labels` float32 [B], NaN where unknown."""
    return Objective(model, ("squared_error",), ("squared_error",), _valued, _regress, abstract_row)


def sequence_objective(labels: Sequence[str], model: ModelConfig) -> Objective:
    """Cross-entropy over the classes of a row, or squared error where there are none."""
    if labels:
        return classes_objective(SequenceModel(model, len(labels)))
    return regression_objective(SequenceModel(model, 1))


def _labelled(batch: Batch) -> dict[str, jax.Array]:
    return {"cross_entropy": jnp.maximum(jnp.sum(_known(batch)), 1.0)}


def _valued(batch: Batch) -> dict[str, jax.Array]:
    return {"squared_error": jnp.maximum(jnp.sum(_known(batch)), 1.0)}


def _known(batch: Batch) -> jax.Array:
    labels = batch["labels"]
    known = jnp.isfinite(labels) if jnp.issubdtype(labels.dtype, jnp.floating) else labels >= 0
    return batch["weights"] * known


def _classify(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[Sums, Outputs]:
    logits, weights = apply(model, params, batch, dropout_key), _known(batch)
    labels = jnp.maximum(batch["labels"], 0)
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    correct = jnp.argmax(logits, axis=-1) == labels
    weight = jnp.sum(weights)
    sums = {
        "cross_entropy": jnp.stack([jnp.sum(losses * weights), weight]),
        "accuracy": jnp.stack([jnp.sum(correct * weights), weight]),
    }
    return sums, {"example": batch["example"], "logits": logits}


def _regress(model: nn.Module, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[Sums, Outputs]:
    values, weights = apply(model, params, batch, dropout_key)[:, 0], _known(batch)
    errors = jnp.square(values - jnp.nan_to_num(batch["labels"]))
    sums = {"squared_error": jnp.stack([jnp.sum(errors * weights), jnp.sum(weights)])}
    return sums, {"example": batch["example"], "logits": values}
