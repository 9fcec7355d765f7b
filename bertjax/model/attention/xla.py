"""Attention masks, self-attention in plain JAX, and NVIDIA's cuDNN kernel. Axis letters: see `encoder.py`."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from bertjax.model.dropout import dropout
from bertjax.model.matmul import einsum
from bertjax.model.partitioning import shard_over_mesh

# Logit of masked keys. It is finite, so that a row of padding gives a uniform distribution rather than NaN.
MASKED_LOGIT = -1e9


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Attention mask: positions attend to positions of the same sequence, in one or both directions.

    Attributes:
      direction: side to attend to: `both`, `left` or `right`. Tokens always attend to themselves.
      sequence_ids: [B, L] int32, index of each position's sequence, starting at 1, or 0 for padding. Sequences are
        contiguous, and no token attends to padding. The output at padding positions may be any finite value.
    """

    direction: str
    sequence_ids: jax.Array


def attention_mask(direction: str, query_ids: jax.Array, key_ids: jax.Array) -> jax.Array:
    """Returns a bool mask [..., L, L] of the keys that each query attends to.

    Padding queries attend to all tokens of the row. For rows of one sequence, the output therefore equals that of
    google-research/bert, even at padding positions.

    Args:
      direction: direction of an `AttentionMask`.
      query_ids, key_ids: sequence ids of the `AttentionMask`, as [..., L, 1] and [..., 1, L].
    """
    mask = (key_ids != 0) & ((query_ids == key_ids) | (query_ids == 0))
    if direction == "both":
        return mask
    shape = query_ids.shape[-2], key_ids.shape[-1]
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
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
    logits = einsum("BLHK,BMHK->BHLM", query, key).astype(jnp.float32)
    ids = mask.sequence_ids
    allowed = attention_mask(mask.direction, ids[:, None, :, None], ids[:, None, None, :])
    logits = jnp.where(allowed, logits, MASKED_LOGIT)
    probabilities = jax.nn.softmax(logits, axis=-1).astype(query.dtype)  # [B, H, L, L]
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return einsum("BHLM,BMHK->BLHK", probabilities, value)


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

    The mask is passed as row lengths, since JAX would convert a boolean mask to a bias and compute the bias gradient,
    which is not needed.

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
