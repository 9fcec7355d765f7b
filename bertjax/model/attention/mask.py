"""Description of the attention mask, which each implementation of attention turns into the form it needs."""

import dataclasses

import jax
import jax.numpy as jnp

DIRECTIONS = ("both", "left", "right")
# Logit of masked keys: finite, so that a row of padding gives a uniform distribution and not NaN.
MASKED_LOGIT = -1e9


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Mask by which positions attend to their own sequence, in one direction or both.

    Attributes:
      direction: `both`, or `left` or `right` for the positions on that side and the position itself.
      sequence_ids: int32 [B, L], the sequence of each position; sequences are contiguous. Nothing attends to padding,
        0. The output at padding positions is arbitrary but must be finite.
    """

    direction: str
    sequence_ids: jax.Array


def attention_mask(direction: str, query_ids: jax.Array, key_ids: jax.Array) -> jax.Array:
    """Returns a bool mask [..., L, L] of the keys that each query attends to.

    Padding queries attend to all tokens of the row, so that a row of one sequence computes the same as
    google-research/bert at every position, including padding.

    Args:
      direction: direction of an `AttentionMask`.
      query_ids, key_ids: its sequence ids, as [..., L, 1] and [..., 1, L].
    """
    mask = (key_ids != 0) & ((query_ids == key_ids) | (query_ids == 0))
    if direction == "both":
        return mask
    shape = query_ids.shape[-2], key_ids.shape[-1]
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return mask & (query >= key if direction == "left" else query <= key)
