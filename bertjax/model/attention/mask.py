"""Which positions of a row attend to which, as a description: each implementation turns it into what it needs."""

import dataclasses

import jax

DIRECTIONS = ("both", "left", "right")


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
