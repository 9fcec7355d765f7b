"""Losses of text embedders: pure functions of the vectors of a batch.

Each function returns a float32 scalar, equal to the loss of the corresponding class in sentence-transformers. Axis
letters: B examples per batch, M documents per example (a positive, then hard negatives), D width of a vector.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bertjax.model.heads import unit
from bertjax.tasks.objectives.losses import cross_entropy
from bertjax.utils.sections import Section, bounded

# Logits of excluded candidates. They are finite, because minus infinity would make gradients NaN.
_EXCLUDED = -1e30
# Maximum number of logits in memory, summed over all devices (256 MiB).
_MAX_LOGITS = 1 << 26


class EmbeddedBatch(NamedTuple):
    """Inputs of a loss: vectors of a batch, and the labels, class logits or guide vectors that the loss needs."""

    queries: jax.Array  # vectors of the anchors, float32 [B, D]
    documents: jax.Array  # vectors of the other texts, the positive first, float32 [B, M, D]
    weights: jax.Array  # float32 [B], 0 in padding rows, otherwise 1
    document_weights: jax.Array  # float32 [B, M], 0 for missing documents, otherwise 1
    labels: Any = None  # float32 [B, K]: a score or class id (K = 1), or a teacher's scores of the documents (K = M)
    class_logits: jax.Array | None = None  # float32 [B, C], only for `softmax`
    guide: jax.Array | None = None  # a guide model's vectors of the anchor and the documents, float32 [B, 1 + M, E]

    def truncate(self, width: int) -> "EmbeddedBatch":
        """Returns the batch with the first `width` components of its vectors. Does not truncate guide vectors."""
        return self._replace(queries=self.queries[:, :width], documents=self.documents[..., :width])


@dataclasses.dataclass(frozen=True)
class LossOptions(Section, prefix="config.embed."):
    """Options of the losses, fields of `config.embed`.

    Attributes:
      temperature: divisor of the cosines in `info_nce`, `gist` and `cosent`.
      both_directions: for `info_nce`, whether to average the loss with a second loss, which selects each positive's
        anchor among all anchors.
      hardness: for `info_nce`, additional weight of similar negatives (EmbeddingGemma uses 5).
    """

    temperature: float = bounded(0.05, above=0)
    both_directions: bool = False
    hardness: float = bounded(0.0, at_least=0)


def in_blocks(function: Callable[[Any, Any], Any], rows: Any, num_blocks: int) -> Any:
    """Applies `function(rows, block)` to blocks of rows sequentially. Returns the results in the order of the rows.

    The backward pass recomputes each block, so that only one block's intermediate values are in memory.
    Row r is in block r % num_blocks. So each block has rows of every device, and no row moves to another device.

    Args:
      function: function from arrays [R / num_blocks, ...] and the block index to arrays of the same length.
      rows: tree of arrays [R, ...].
      num_blocks: divisor of R.
    """
    if num_blocks == 1:
        return function(rows, 0)
    blocks = jax.tree.map(lambda x: x.reshape(-1, num_blocks, *x.shape[1:]).swapaxes(0, 1), rows)
    results = jax.lax.map(lambda block: jax.checkpoint(function)(*block), (blocks, jnp.arange(num_blocks)))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), results)


def info_nce(batch: EmbeddedBatch, options: LossOptions) -> jax.Array:
    """Returns the cross-entropy of the positive among all documents of the batch (InfoNCE, arXiv 1807.03748).

    `both_directions` averages this with the cross-entropy of the anchor among all anchors, given the positive.
    `hardness` adds `hardness` * cosine, without a gradient, to the logits of negatives (EmbeddingGemma, arXiv
    2509.20354).
    """
    queries, positives = unit(batch.queries), unit(batch.documents[:, 0])
    candidates = _flatten(unit(batch.documents))
    is_candidate = _flatten(batch.document_weights * batch.weights[:, None])

    def losses(rows: tuple[jax.Array, ...], block: Any) -> jax.Array:
        query, positive, row = rows
        cosines = _inner_products(query, candidates)
        bonus = jnp.where(_is_own(row, len(candidates)), 0, options.hardness * jax.lax.stop_gradient(cosines))
        log_z = _log_sum_exp(cosines / options.temperature + bonus, is_candidate)
        if options.both_directions:
            reverse = _log_sum_exp(_inner_products(positive, queries) / options.temperature, batch.weights)
            log_z = (log_z + reverse) / 2
        return log_z - jnp.sum(query * positive, axis=-1) / options.temperature

    rows = (queries, positives, jnp.arange(len(queries)))
    return _mean(in_blocks(losses, rows, _num_blocks(len(queries), len(candidates))), batch.weights)


def gist(batch: EmbeddedBatch, options: LossOptions) -> jax.Array:
    """Returns InfoNCE without candidates that the guide scores above the positive (GISTEmbed, arXiv 2402.16829).

    The anchor is compared with all documents and with the other anchors, and the positive with the other positives.
    """
    assert batch.guide is not None
    documents = unit(batch.documents)
    queries, positives, candidates = unit(batch.queries), documents[:, 0], _flatten(documents)
    guide = unit(batch.guide)
    guide_queries, guide_positives, guide_candidates = guide[:, 0], guide[:, 1], _flatten(guide[:, 1:])
    is_candidate = _flatten(batch.document_weights * batch.weights[:, None])

    def losses(rows: tuple[jax.Array, ...], block: Any) -> jax.Array:
        query, positive, guide_query, guide_positive, row = rows
        threshold = jnp.sum(guide_query * guide_positive, axis=-1, keepdims=True)
        logits, masks = [], []
        for vectors, others, guide_vectors, guide_others, weights in (
            (query, candidates, guide_query, guide_candidates, is_candidate),
            (query, queries, guide_query, guide_queries, batch.weights),
            (positive, positives, guide_positive, guide_positives, batch.weights),
        ):
            logits.append(_inner_products(vectors, others) / options.temperature)
            masks.append((_inner_products(guide_vectors, guide_others) <= threshold) & (weights > 0))
        masks = [masks[0] | _is_own(row, len(candidates)), *(mask & ~_is_own(row, len(queries)) for mask in masks[1:])]
        log_z = _log_sum_exp(jnp.concatenate(logits, axis=1), jnp.concatenate(masks, axis=1))
        return log_z - jnp.sum(query * positive, axis=-1) / options.temperature

    rows = (queries, positives, guide_queries, guide_positives, jnp.arange(len(queries)))
    num_columns = len(candidates) + 2 * len(queries)
    return _mean(in_blocks(losses, rows, _num_blocks(len(queries), num_columns)), batch.weights)


def cosent(batch: EmbeddedBatch, options: LossOptions) -> jax.Array:
    """Returns log(1 + sum exp(c_i - c_j)) over all pairs of examples with score_i < score_j.

    c_i is the cosine of the two texts of example i, divided by the temperature (CoSENT, kexue.fm/archives/8847).
    """
    order = jnp.argsort(batch.labels[:, 0])
    scores, weights = batch.labels[order, 0], batch.weights[order]
    cosines = _cosines(batch)[order] / options.temperature
    # Compute cumulative sums over the sorted examples, so that no matrix of all pairs is needed.
    sums = jax.lax.associative_scan(jnp.logaddexp, jnp.where(weights > 0, cosines, _EXCLUDED))
    num_lower = jnp.searchsorted(scores, scores)
    differences = sums[num_lower - 1] - cosines
    return jax.nn.logsumexp(jnp.append(jnp.where((num_lower > 0) & (weights > 0), differences, _EXCLUDED), 0.0))


def cosine(batch: EmbeddedBatch, options: LossOptions) -> jax.Array:
    """Returns the mean squared error between the cosine of two texts and their score (arXiv 1908.10084, section 3)."""
    return _mean((_cosines(batch) - batch.labels[:, 0]) ** 2, batch.weights)


def softmax(batch: EmbeddedBatch, options: LossOptions) -> jax.Array:
    """Returns the cross-entropy of a linear classifier on (u, v, |u - v|) for two texts (arXiv 1908.10084)."""
    assert batch.class_logits is not None
    return _mean(cross_entropy(batch.class_logits, batch.labels[:, 0].astype(jnp.int32)), batch.weights)


def distill_vectors(batch: EmbeddedBatch, options: LossOptions) -> jax.Array:
    """Returns the mean squared error between the vectors of all texts and a guide's vectors (arXiv 2004.09813)."""
    assert batch.guide is not None
    vectors = jnp.concatenate([batch.queries[:, None], batch.documents], axis=1)
    guide = batch.guide[..., : vectors.shape[-1]]
    weights = jnp.concatenate([jnp.ones_like(batch.document_weights[:, :1]), batch.document_weights], axis=1)
    errors = jnp.mean((vectors - guide) ** 2, axis=-1)
    return _mean(errors, weights * batch.weights[:, None])


def margin_mse(batch: EmbeddedBatch, options: LossOptions) -> jax.Array:
    """Returns the mean squared error between the model's score margins and a teacher's (arXiv 2010.02666).

    A score is the inner product of anchor and document. A margin is the positive's score minus a negative's score.
    `labels` contains the teacher's scores for all documents.
    """
    scores = jnp.einsum("BD,BMD->BM", batch.queries, batch.documents, precision=jax.lax.Precision.HIGHEST)
    margins, targets = (values[:, :1] - values[:, 1:] for values in (scores, batch.labels))
    return _mean((margins - targets) ** 2, batch.document_weights[:, 1:] * batch.weights[:, None])


@dataclasses.dataclass(frozen=True)
class EmbeddingLoss:
    """A loss and the data that it needs."""

    function: Callable[[EmbeddedBatch, LossOptions], jax.Array]  # function of the batch and the options
    options: tuple[str, ...] = ()  # names of the `LossOptions` that have an effect
    label: str = ""  # kind of label: "" (none), `score` (a number), `class`, or `scores` (a number for each document)
    # Whether documents of other examples are negatives. If so, a batch must not repeat a text.
    in_batch_negatives: bool = False
    needs_guide: bool = False  # whether the loss needs the vectors of a guide model
    # Minimum and maximum number of documents per example (default of `max_documents`: 0, no limit).
    min_documents: int = 1
    max_documents: int = 0


LOSSES = {
    "info_nce": EmbeddingLoss(info_nce, ("temperature", "both_directions", "hardness"), in_batch_negatives=True),
    "gist": EmbeddingLoss(gist, ("temperature",), in_batch_negatives=True, needs_guide=True),
    "cosent": EmbeddingLoss(cosent, ("temperature",), label="score", max_documents=1),
    "cosine": EmbeddingLoss(cosine, label="score", max_documents=1),
    "softmax": EmbeddingLoss(softmax, label="class", max_documents=1),
    "distill_vectors": EmbeddingLoss(distill_vectors, needs_guide=True, min_documents=0),
    "margin_mse": EmbeddingLoss(margin_mse, label="scores", min_documents=2),
}


def _flatten(values: jax.Array) -> jax.Array:
    """Flattens values of documents [B, M, ...] to [M B, ...]: the positives of all examples, then the negatives."""
    return values.swapaxes(0, 1).reshape(-1, *values.shape[2:])


def _is_own(rows: jax.Array, num_candidates: int) -> jax.Array:
    """Returns a mask that is True at the positive (or anchor) of each row's example, bool [rows, candidates]."""
    return rows[:, None] == jnp.arange(num_candidates)


def _inner_products(rows: jax.Array, columns: jax.Array) -> jax.Array:
    # On TPU, the default precision is bfloat16, which is too low for cosines that are divided by a temperature.
    return jnp.matmul(rows, columns.T, precision=jax.lax.Precision.HIGHEST)


def _log_sum_exp(logits: jax.Array, weights: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(jnp.where(weights > 0, logits, _EXCLUDED), axis=-1)


def _cosines(batch: EmbeddedBatch) -> jax.Array:
    return jnp.sum(unit(batch.queries) * unit(batch.documents[:, 0]), axis=-1)


def _mean(losses: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def _num_blocks(num_rows: int, num_columns: int) -> int:
    """Returns the smallest number of equal blocks with at most `_MAX_LOGITS` logits each.

    Each block has at least one row per shard, even if its logits then exceed the limit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    limit = num_rows // (1 if mesh.empty else mesh.shape["data"] * mesh.shape["fsdp"])
    needed = min(limit, math.ceil(num_rows * num_columns / _MAX_LOGITS))
    return next(count for count in range(max(1, needed), limit + 1) if limit % count == 0)
