"""What a batch holds, written once: shapes, rows of random numbers and rows that are only padding come of it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """An array of a batch.

    Attributes:
      name: in the batch.
      axes: names of its sizes behind the rows.
      dtype: int32 or float32.
      below: name of the size that its numbers are below, to draw random ones; "" are ones.
      counted: they are 0, 1, 2, ... along the last axis instead.
      padding: what it holds in a row that is only padding.
    """

    name: str
    axes: tuple[str, ...]
    dtype: str = "int32"
    below: str = ""
    counted: bool = False
    padding: int = 0


Schema = tuple[ArraySpec, ...]


def abstract_batch(schema: Schema, rows: int, **sizes: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a batch."""
    return {
        part.name: jax.ShapeDtypeStruct((rows, *(sizes[axis] for axis in part.axes)), part.dtype) for part in schema
    }


def synthetic_batch(schema: Schema, rows: int, seed: int = 0, **sizes: int) -> dict[str, np.ndarray]:
    """Full rows of random numbers, to time a step with: the most work that a batch of the shape can be."""
    rng = np.random.default_rng(seed)
    sizes = {"rows": rows, **sizes}
    batch = {}
    for part in schema:
        shape = (rows, *(sizes[axis] for axis in part.axes))
        if part.counted:
            values = np.broadcast_to(np.arange(shape[-1]), shape)
        else:
            values = rng.integers(0, sizes[part.below], shape) if part.below else np.ones(shape)
        batch[part.name] = values.astype(part.dtype)
    return batch


def is_token(batch: Mapping[str, Any]) -> Any:
    """Of each position of a batch, whether it is a token and not padding, as the array is that tells it."""
    return batch["sequence_ids" if "sequence_ids" in batch else "input_mask"] > 0


def padding_of(schema: Schema) -> dict[str, int]:
    """What each array holds in a row that is only padding."""
    return {part.name: part.padding for part in schema}


def sequences(*axes: str) -> Schema:
    """What every encoder takes: sequences of tokens, along the last axis."""
    return (
        ArraySpec("input_ids", axes, below="pieces"),
        ArraySpec("input_mask", axes),
        ArraySpec("segment_ids", axes, below="segments"),
    )


# Batches with one sequence per example, and with several that are encoded apart.
SEQUENCE = sequences("length")
MULTI_SEQUENCE = sequences("sequences_per_example", "length")
# Of a fine-tuning row: its place in the input, and whether it is there.
EXAMPLE: Schema = (ArraySpec("example", (), below="rows", padding=-1), ArraySpec("weights", (), "float32"))
# Tags of words, at their first pieces.
TOKEN_LABELS = ArraySpec("token_labels", ("length",), below="classes", padding=-1)
