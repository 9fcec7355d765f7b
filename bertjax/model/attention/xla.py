"""Self-attention in plain JAX for any mask, dropout rate and mesh. Axis letters: see `encoder.py`."""

import jax
import jax.numpy as jnp

from bertjax.model.attention.mask import MASKED_LOGIT, AttentionMask, attention_mask
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
    """Computes softmax(Q K^T / sqrt(K)) V with a float32 softmax, as an `AttentionFn`."""
    query = query * query.shape[-1] ** -0.5
    logits = jnp.einsum("BLHK,BMHK->BHLM", query, key).astype(jnp.float32)
    ids = mask.sequence_ids
    allowed = attention_mask(mask.direction, ids[:, None, :, None], ids[:, None, None, :])
    logits = jnp.where(allowed, logits, MASKED_LOGIT)
    probabilities = jax.nn.softmax(logits, axis=-1).astype(query.dtype)  # [B, H, L, L]
    probabilities = dropout(probabilities, dropout_rate, dropout_key)
    return jnp.einsum("BHLM,BMHK->BLHK", probabilities, value)
