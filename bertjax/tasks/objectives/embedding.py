"""Objective of text embedders: encodes a batch in chunks, then computes one loss over all its vectors."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.data.schema import ArraySpec, Schema
from bertjax.metrics.metric import Metric, loss_metric
from bertjax.model.dropout import block_key
from bertjax.model.layers import Dense
from bertjax.model.models import EmbeddingModel
from bertjax.model.partitioning import with_logical_constraint
from bertjax.tasks.objectives.embedding_losses import LOSSES, EmbeddedBatch, LossOptions, in_blocks
from bertjax.tasks.task import Batch, MetricSums, Objective, Outputs

# Arrays of packed rows. `texts` has each text's index in the batch (example * columns + column), or -1 if unused.
_ROWS = (
    ArraySpec("input_ids", ("length",), num_values="pieces"),
    ArraySpec("segment_ids", ("length",)),
    ArraySpec("sequence_ids", ("length",)),
    ArraySpec("position_ids", ("length",), ascending=True),
    ArraySpec("texts", ("texts",), padding=-1),
)
_LABELS = ArraySpec("labels", ("labels",), "float32", num_values="classes")
_GUIDE = ArraySpec("guide", ("example_texts", "guide_width"), "float32")
_CLASSIFIER = "classifier"


@dataclasses.dataclass(frozen=True)
class Embedding(Objective):
    """Objective that trains an embedder with a loss of `embedding_losses.py`. Evaluation computes only the vectors."""

    splits_into_micro_batches = False

    model: EmbeddingModel
    loss: str = "info_nce"  # name of the loss
    options: LossOptions = LossOptions()
    # Sizes to which vectors are truncated. The losses of all sizes are added (Matryoshka, arXiv 2205.13147; default:
    # (), only full vectors).
    dims: tuple[int, ...] = ()
    # Texts to encode at once (default: 0, the whole batch). The backward pass encodes each chunk again, so that memory
    # does not grow with the batch (GradCache, arXiv 2101.06983).
    chunk: int = 0
    num_classes: int = 0  # number of classes of the loss `softmax`

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (loss_metric(self.loss),)

    @property
    def schema(self) -> Schema:
        loss = LOSSES[self.loss]
        return (
            *_ROWS,
            ArraySpec("weights", (), "float32"),
            ArraySpec("document_weights", ("documents",), "float32"),
            *((_LABELS,) if loss.label else ()),
            *((_GUIDE,) if loss.needs_guide else ()),
        )

    def denominators(self, batch: Batch) -> dict[str, jax.Array]:
        return {self.loss: jnp.maximum(jnp.sum(batch["weights"]), 1.0)}

    def compute(self, params: Any, batch: Batch, dropout_key: jax.Array | None) -> tuple[MetricSums, Outputs]:
        if dropout_key is None:  # Evaluation batches have one text per row.
            outputs = {"example": batch["example"], "vectors": self.apply(params, batch, None)}
            return {self.loss: jnp.zeros(2)}, outputs
        vectors = self.encode(params, batch, dropout_key)
        examples = vectors.reshape(len(batch["weights"]), -1, vectors.shape[-1])
        arrays: dict[str, Any] = {name: batch[name] for name in EmbeddedBatch._fields if name in batch}
        if self.num_classes:
            arrays["class_logits"] = self._class_logits(params, examples)
        embedded, function = EmbeddedBatch(examples[:, 0], examples[:, 1:], **arrays), LOSSES[self.loss].function
        loss = sum(function(embedded.truncate(dim), self.options) for dim in self.dims or (vectors.shape[-1],))
        weight = self.denominators(batch)[self.loss]
        return {self.loss: jnp.stack([loss * weight, weight])}, {}

    def encode(self, params: Any, batch: Batch, dropout_key: jax.Array) -> jax.Array:
        """Returns the vectors of all T texts of a training batch, float32 [T, D], zeros for missing texts."""
        rows = {spec.name: batch[spec.name] for spec in _ROWS}
        num_chunks = rows["texts"].size // self.chunk if self.chunk else 1

        def encode_chunk(rows: Batch, chunk: Any) -> jax.Array:
            rows = {name: with_logical_constraint(rows[name], ("batch", None)) for name in rows}
            key = block_key(dropout_key, chunk, num_chunks) if num_chunks > 1 else dropout_key
            return self.apply(params, rows, key)

        vectors = in_blocks(encode_chunk, rows, num_chunks)
        num_texts = len(batch["weights"]) * (1 + batch["document_weights"].shape[1])
        # Give missing texts the index `num_texts`, which is out of bounds, so that `at[].set` drops their vectors.
        indices = jnp.where(rows["texts"] < 0, num_texts, rows["texts"]).ravel()
        vectors = vectors.reshape(-1, vectors.shape[-1])
        ordered = jnp.zeros((num_texts, vectors.shape[-1])).at[indices].set(vectors, mode="drop")
        return with_logical_constraint(ordered, (None, None))

    def _class_logits(self, params: Any, examples: jax.Array) -> jax.Array:
        first, second = examples[:, 0], examples[:, 1]
        features = jnp.concatenate([first, second, jnp.abs(first - second)], axis=-1)
        logits: Any = self._classifier.apply({"params": params[_CLASSIFIER]}, features)
        return logits.astype(jnp.float32)

    @property
    def _classifier(self) -> Dense:
        return Dense(self.model.config, (self.num_classes,), ("embed", None))

    def init_params(self, key: jax.Array) -> Any:
        params = super().init_params(key)
        if not self.num_classes:
            return params
        classifier = self._classifier.init(jax.random.fold_in(key, 1), jnp.zeros((1, 3 * self.model.width)))
        return {**params, _CLASSIFIER: classifier["params"]}
