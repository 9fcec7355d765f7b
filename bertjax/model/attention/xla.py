"""Attention masks, self-attention in plain JAX, and NVIDIA's cuDNN kernel. Axis letters: see `encoder.py`."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from bertjax.model.dropout import dropout
from bertjax.model.matmul import einsum
from bertjax.model.partitioning import shard_over_mesh

# Logit of masked keys. It is finite, so that the softmax of a row of padding is uniform rather than NaN.
MASKED_LOGIT = -1e9
# Rows of at least this many tokens are processed in blocks of queries.
_LONG_ROW, _QUERY_BLOCK = 2048, 512


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Attention mask: positions attend to positions of the same sequence, in one or both directions.

    Attributes:
      direction: side to attend to: `both`, `left` or `right`. Tokens always attend to themselves.
      sequence_ids: [B, L] int32, index of each position's sequence, starting at 1, or 0 for padding. Sequences are
        contiguous, and no token attends to padding. The output at padding positions may be any finite value.
      window: number of tokens that a token attends to beside itself, half of them on each side (default: 0, all).
    """

    direction: str
    sequence_ids: jax.Array
    window: int = 0


def attention_mask(direction: str, query_ids: jax.Array, key_ids: jax.Array, window: int = 0) -> jax.Array:
    """Returns a bool mask [..., L, L] of the keys that each query attends to.

    Padding queries attend to all tokens of the row. For rows of one sequence, the output therefore equals that of
    google-research/bert, even at padding positions.

    Args:
      direction: direction of an `AttentionMask`.
      query_ids, key_ids: sequence ids of the `AttentionMask`, as [..., L, 1] and [..., 1, L].
      window: `AttentionMask.window`.
    """
    mask = (key_ids != 0) & ((query_ids == key_ids) | (query_ids == 0))
    if direction == "both" and not window:
        return mask
    shape = query_ids.shape[-2], key_ids.shape[-1]
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    if window:
        return mask & (jnp.abs(query - key) <= window // 2)
    return mask & (query >= key if direction == "left" else query <= key)


def xla_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    mesh: jax.sharding.AbstractMesh,
) -> jax.Array:
    """Computes softmax(Q K^T / sqrt(head size)) V with the softmax in float32. Implements `AttentionFn`."""
    query = query * query.shape[-1] ** -0.5
    has_dropout = dropout_rate > 0 and dropout_key is not None
    # In exports, the row length is symbolic, so rows cannot be divided into blocks.
    length = query.shape[1] if isinstance(query.shape[1], int) else 0
    if mask.window and length > 2 * mask.window and not has_dropout:
        return _attend_in_blocks(query, key, value, mask)
    if length >= _LONG_ROW and mask.direction == "both" and not (mask.window or has_dropout):
        return _attend_by_queries(query, key, value, mask.sequence_ids)
    logits = einsum("BLHK,BMHK->BHLM", query, key).astype(jnp.float32)
    ids = mask.sequence_ids
    allowed = attention_mask(mask.direction, ids[:, None, :, None], ids[:, None, None, :], mask.window)
    logits = jnp.where(allowed, logits, MASKED_LOGIT)
    probabilities = jax.nn.softmax(logits, axis=-1).astype(query.dtype)  # [B, H, L, L]
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return einsum("BHLM,BMHK->BLHK", probabilities, value)


def _attend_by_queries(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array) -> jax.Array:
    """Computes attention for one block of queries after the other, in memory proportional to L.

    The backward pass recomputes a block's probabilities.
    """
    rows, length, heads, size = query.shape
    num_blocks = -(-length // _QUERY_BLOCK)
    padding = num_blocks * _QUERY_BLOCK - length

    def blocks(x: jax.Array) -> jax.Array:  # [B, L, ...] to [blocks, B, Q, ...]
        padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return padded.reshape(rows, num_blocks, _QUERY_BLOCK, *x.shape[2:]).swapaxes(0, 1)

    def attend(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, query_ids = block
        allowed = attention_mask("both", query_ids[:, None, :, None], ids[:, None, None, :])
        logits = einsum("BQHK,BMHK->BHQM", queries, key).astype(jnp.float32)
        probabilities = jax.nn.softmax(jnp.where(allowed, logits, MASKED_LOGIT), axis=-1).astype(query.dtype)
        return einsum("BHQM,BMHK->BQHK", probabilities, value)

    context = jax.lax.map(jax.checkpoint(attend), (blocks(query), blocks(ids)))
    return context.swapaxes(0, 1).reshape(rows, -1, heads, size)[:, :length]


def _attend_in_blocks(query: jax.Array, key: jax.Array, value: jax.Array, mask: AttentionMask) -> jax.Array:
    """Computes local attention in time and memory proportional to L * window instead of L * L.

    Each block of `window` queries attends to the keys of the block and of half a window on each side.
    """
    rows, length, heads, size = query.shape
    half = mask.window // 2
    num_blocks = -(-length // (2 * half))
    padding = 2 * half * num_blocks - length

    def neighbors(x: jax.Array) -> jax.Array:  # [B, L, ...] to [B, blocks, 4 * half, ...]
        padded = jnp.pad(x, [(0, 0), (half, half + padding)] + [(0, 0)] * (x.ndim - 2))
        chunks = padded.reshape(rows, -1, half, *x.shape[2:])
        parts = [chunks[:, first : first + 2 * num_blocks : 2] for first in range(4)]
        return jnp.concatenate(parts, axis=2)

    def blocks(x: jax.Array) -> jax.Array:  # [B, L, ...] to [B, blocks, 2 * half, ...]
        padded = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        return padded.reshape(rows, num_blocks, 2 * half, *x.shape[2:])

    ids = mask.sequence_ids
    allowed = attention_mask("both", blocks(ids)[..., None], neighbors(ids)[:, :, None])  # [B, blocks, Q, M]
    distance = np.arange(2 * half)[:, None] - (np.arange(4 * half) - half)
    allowed = (allowed & (np.abs(distance) <= half))[:, :, None]
    logits = einsum("BNQHK,BNMHK->BNHQM", blocks(query), neighbors(key)).astype(jnp.float32)
    logits = jnp.where(allowed, logits, MASKED_LOGIT)
    probabilities = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
    context = einsum("BNHQM,BNMHK->BNQHK", probabilities, neighbors(value))
    return context.reshape(rows, -1, heads, size)[:, :length]


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    mesh: jax.sharding.AbstractMesh,
    implementation: Literal["xla", "cudnn"] = "cudnn",
) -> jax.Array:
    """Computes the same attention as `xla_attention`. Implements `AttentionFn`.

    The mask is passed as row lengths. JAX would convert a boolean mask to a bias and compute an unnecessary gradient.

    Args:
      implementation: implementation of `jax.nn.dot_product_attention`; `xla` computes the same values on any platform.
    """
    if dropout_rate and dropout_key is not None:
        raise ValueError("cudnn attention does not support dropout")

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, sequence_ids: jax.Array) -> jax.Array:
        lengths = jnp.sum(sequence_ids != 0, axis=-1, dtype=jnp.int32)
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            is_causal=mask.direction == "left",
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            implementation=implementation,
        )

    rows, _, heads, _ = query.shape
    states = ("batch", None, "heads", None)
    sizes = {"batch": rows, "heads": heads}
    on_mesh = shard_over_mesh(attend, mesh, sizes, (states, states, states, ("batch", None)), states)
    return on_mesh(query, key, value, mask.sequence_ids)
