"""Description of the attention mask. Each attention implementation converts it to the form that it needs."""

import dataclasses

import jax
import jax.numpy as jnp

DIRECTIONS = ("both", "left", "right")
# Logit of masked keys. It is finite, so that a row of padding gives a uniform distribution rather than NaN.
MASKED_LOGIT = -1e9


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Attention mask: positions attend to positions of the same sequence, in one or both directions.

    Attributes:
      direction: side to attend to: `both`, `left` or `right`. Tokens always attend to themselves.
      sequence_ids: int32 [B, L], sequence of each position, 0 for padding. Sequences are contiguous, and no token
        attends to padding. The output at padding positions may be any finite value.
    """

    direction: str
    sequence_ids: jax.Array


def attention_mask(direction: str, query_ids: jax.Array, key_ids: jax.Array) -> jax.Array:
    """Returns a bool mask [..., L, L] of the keys that each query attends to.

    Padding queries attend to all tokens of the row. So for rows of one sequence, the output equals google-research/bert
    at every position, including padding.

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
