"""Which positions of a row attend to which, as a description: each implementation turns it into what it needs."""

import dataclasses

import jax
import jax.numpy as jnp

DIRECTIONS = ("both", "left", "right")
# The logit of what is not seen: finite, so that a row of padding alone gives a uniform distribution and not NaN.
NOT_SEEN = -1e9


@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """A position attends to the positions of its own sequence, in one direction or both. Axis letters: `encoder.py`.

    Attributes:
      direction: `both`, or what is to the `left` or to the `right` of a position, itself included.
      sequence_ids: int32 [B, L], the sequence of a row that a position belongs to, each without a gap. 0 is padding, to
        which nothing attends; what a padding position attends to does not matter to anyone, except that what comes out
        there must be finite.
    """

    direction: str
    sequence_ids: jax.Array


def allowed(direction: str, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Which key each query may see: bool [..., L, L].

    Padding queries see every real key of the direction, so that a row with one sequence computes what
    google-research/bert computes at every position, padding included.

    Args:
      direction: of an `AttentionMask`.
      queries, keys: its sequence ids, [..., L, 1] and [..., 1, L].
    """
    seen = (keys != 0) & ((queries == keys) | (queries == 0))
    if direction == "both":
        return seen
    shape = queries.shape[-2], keys.shape[-1]
    query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return seen & (query >= key if direction == "left" else query <= key)
