"""Custom attention: each token attends to itself and to the 64 tokens before and after it.

    PYTHONPATH=examples bertjax train --config pretrain:size=tiny,corpus=runs/corpus \\
      --config.model.attention=custom_attention.local_attention --workdir runs/local

`config.model.attention=MODULE.FUNCTION` selects your function. bertjax itself needs no change. The function must apply
dropout and packing masks, and work on any mesh. To store an option in checkpoints, add a field to `Architecture`.
"""

import jax
import jax.numpy as jnp

from bertjax.model.attention.xla import MASKED_LOGIT, AttentionMask, attention_mask
from bertjax.model.dropout import dropout

WINDOW = 64


def local_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: AttentionMask,
    *,
    dropout_rate: float,
    dropout_key: jax.Array | None,
    mesh: jax.sharding.AbstractMesh,
) -> jax.Array:
    """Returns attention outputs [B, L, H, K] of query, key and value [B, L, H, K], within a window."""
    del mesh  # XLA shards these operations by itself.
    position = jnp.arange(query.shape[1])
    is_near = jnp.abs(position[:, None] - position) <= WINDOW
    ids = mask.sequence_ids
    allowed = attention_mask(mask.direction, ids[:, None, :, None], ids[:, None, None, :]) & is_near  # [B, 1, L, L]
    logits = jnp.einsum("BLHK,BMHK->BHLM", query * query.shape[-1] ** -0.5, key).astype(jnp.float32)
    probabilities = jax.nn.softmax(jnp.where(allowed, logits, MASKED_LOGIT), axis=-1).astype(query.dtype)
    return jnp.einsum("BHLM,BMHK->BLHK", dropout(probabilities, dropout_rate, dropout_key), value)
