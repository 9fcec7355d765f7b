"""Self-attention in plain JAX: any mask, dropout, any mesh. Axis letters: see `encoder.py`."""

import jax
import jax.numpy as jnp

from bertjax.model.attention.mask import NOT_SEEN, AttentionMask, allowed
from bertjax.model.dropout import dropout


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
    ids = mask.sequence_ids
    logits = jnp.where(allowed(mask.direction, ids[:, None, :, None], ids[:, None, None, :]), logits, NOT_SEEN)
    probabilities = jax.nn.softmax(logits, axis=-1).astype(query.dtype)  # [B, H, L, L]
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return jnp.einsum("BHLM,BMHK->BLHK", probabilities, value)
