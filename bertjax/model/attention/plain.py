"""Self-attention in plain JAX: any mask, dropout, any mesh. Axis letters: see `encoder.py`."""

import jax
import jax.numpy as jnp

from bertjax.model.attention.mask import AttentionMask
from bertjax.model.dropout import dropout


def allowed(mask: AttentionMask) -> jax.Array:
    """Which key each query may see: bool [B, 1, L, L].

    Padding queries see every real key of the direction, so that a row with one sequence computes what
    google-research/bert computes at every position, padding included.
    """
    queries, keys = mask.sequence_ids[:, None, :, None], mask.sequence_ids[:, None, None, :]
    seen = (keys != 0) & ((queries == keys) | (queries == 0))
    position = jnp.arange(mask.sequence_ids.shape[1])
    if mask.direction == "left":
        seen &= position[:, None] >= position
    elif mask.direction == "right":
        seen &= position[:, None] <= position
    return seen


def plain_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    mesh: jax.sharding.AbstractMesh,
) -> jax.Array:
    """softmax(Q K^T / sqrt(K)) V with the softmax in float32; an `AttentionFn`."""
    query = query * query.shape[-1] ** -0.5
    logits = jnp.einsum("BLHK,BMHK->BHLM", query, key).astype(jnp.float32)
    # Finite, so that a row of padding alone gives a uniform distribution and not NaN.
    logits = jnp.where(allowed(mask), logits, -1e9)
    probabilities = jax.nn.softmax(logits, axis=-1).astype(query.dtype)  # [B, H, L, L]
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return jnp.einsum("BHLM,BMHK->BLHK", probabilities, value)
