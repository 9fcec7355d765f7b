"""Output of `bertjax inspect`: wrapped text and `.npz` files."""

import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np

from bertjax.errors import UsageError
from bertjax.utils.io import write_npz

_WIDTH = 120


def paragraph(head: str, text: str) -> list[str]:
    """Wraps text into lines; the first line starts with `head`."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent="   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def write_batches(batches: Iterable[Mapping[str, np.ndarray]], path: str | Path) -> None:
    """Writes the batches of consecutive steps to one `.npz` file, atomically.

    Batches are stacked into arrays [N, ...]. If batch shapes change between phases, array names have a prefix for each
    phase: `phase_0/input_ids`, `phase_1/input_ids` and so on.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {path}: it exists and is not a file; choose another path")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: no directory {path.parent}; create it first")
    phases = [list(group) for _, group in groupby(batches, lambda batch: {k: np.shape(v) for k, v in batch.items()})]
    if not phases:
        raise UsageError(f"no batches to write to {path}; use at least one step")
    arrays = {
        f"phase_{index}/{name}" if len(phases) > 1 else name: np.stack([batch[name] for batch in phase])
        for index, phase in enumerate(phases)
        for name in phase[0]
    }
    write_npz(path, arrays)
