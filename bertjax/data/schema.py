"""Batch schemas, which describe the arrays of a batch by name, axes and dtype."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """Specification of one array of a batch."""

    name: str  # key in the batch
    axes: tuple[str, ...]  # names of the axes after the row axis
    dtype: str = "int32"  # int32 or float32
    # `synthetic_batch` fills the array with random integers below `sizes[num_values]` (default: "", fills it with 1).
    num_values: str = ""
    ascending: bool = False  # whether `synthetic_batch` fills the last axis with 0, 1, 2, ...
    padding: int = 0  # value in padding rows


Schema = tuple[ArraySpec, ...]


def synthetic_batch(schema: Schema, sizes: Mapping[str, int], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns a random batch without padding, for benchmarks.

    `sizes` contains `rows`, and a size for each name in `axes` and `num_values` of the schema.
    """
    rng = np.random.default_rng(seed)
    batch = {}
    for spec in schema:
        shape = (sizes["rows"], *(sizes[axis] for axis in spec.axes))
        if spec.ascending:
            values = np.broadcast_to(np.arange(shape[-1]), shape)
        else:
            values = rng.integers(0, sizes[spec.num_values], shape) if spec.num_values else np.ones(shape)
        batch[spec.name] = values.astype(spec.dtype)
    return batch


def is_token(batch: Mapping[str, Any]) -> Any:
    """Returns a mask of the positions that are not padding, bool [..., L]."""
    return batch["sequence_ids" if "sequence_ids" in batch else "input_mask"] > 0


def sequences(*axes: str) -> Schema:
    """Returns the schema of the encoder's inputs. The last axis is the position in the sequence."""
    return (
        ArraySpec("input_ids", axes, num_values="pieces"),
        ArraySpec("input_mask", axes),
        ArraySpec("segment_ids", axes, num_values="segments"),
    )


# Encoder inputs for one sequence per example, and for several, as in multiple choice.
SEQUENCE = sequences("length")
MULTI_SEQUENCE = sequences("sequences_per_example", "length")
# Index of each fine-tuning example, and weight of each example in the loss (0 in padding rows).
EXAMPLE: Schema = (ArraySpec("example", (), num_values="rows", padding=-1), ArraySpec("weights", (), "float32"))
# Tag id at the first word piece of each word, -1 at all other positions.
TOKEN_LABELS = ArraySpec("token_labels", ("length",), num_values="classes", padding=-1)
