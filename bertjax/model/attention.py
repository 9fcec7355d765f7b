"""Self-attention over rows that may hold several independent sequences. Axis letters: see `encoder.py`."""

from typing import Protocol

import jax
import jax.numpy as jnp

from bertjax.model.layers import dropout


class AttentionFn(Protocol):
    """What stands in for `dot_product_attention`, such as a fused kernel.

    `query, key, value` are [B, L, H, K], `sequence_ids` [B, L] int32; returns [B, L, H, K]. A position attends to the
    positions with its own sequence id. Id 0 is padding, to which nothing attends; what a padding position attends to
    does not matter to anyone, except that it must be finite.
    """

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sequence_ids: jax.Array,
        *,
        dropout_rate: float,
        dropout_key: jax.Array | None,
    ) -> jax.Array: ...


def attention_mask(sequence_ids: jax.Array) -> jax.Array:
    """Which key each query may see: [B, L] int32 to [B, 1, L, L] bool.

    Padding queries see every real key, so that a row with one sequence computes what google-research/bert computes
    at every position, padding included.
    """
    queries, keys = sequence_ids[:, None, :, None], sequence_ids[:, None, None, :]
    return (keys != 0) & ((queries == keys) | (queries == 0))


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    sequence_ids: jax.Array,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
) -> jax.Array:
    """softmax(Q K^T / sqrt(K)) V with the softmax in float32; an `AttentionFn`."""
    query = query * query.shape[-1] ** -0.5
    logits = jnp.einsum("BLHK,BMHK->BHLM", query, key).astype(jnp.float32)
    # Finite, so that a row of padding alone gives a uniform distribution and not NaN.
    logits = jnp.where(attention_mask(sequence_ids), logits, -1e9)
    probabilities = jax.nn.softmax(logits, axis=-1).astype(query.dtype)  # [B, H, L, L]
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return jnp.einsum("BHLM,BMHK->BLHK", probabilities, value)
