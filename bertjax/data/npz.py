"""Batches for people: text in paragraphs, and `.npz` files."""

import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np

from bertjax.errors import UsageError
from bertjax.utils.io import write_npz

_WIDTH = 120


def paragraph(head: str, text: str) -> list[str]:
    """Lines of a paragraph that begins with `head`."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent="   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def write_batches(batches: Iterable[Mapping[str, np.ndarray]], path: str | Path) -> None:
    """Writes the batches of consecutive steps to one `.npz` file, whole or not at all.

    Each array has the batches stacked, [N, ...] under its name in the batch. Where batches change their shape, as
    between phases, each run of equal shapes has arrays of its own, `phase_0/input_ids`, `phase_1/input_ids` and so on.

    Raises:
      UsageError: there are no batches, or the folder does not exist.
      BertjaxError: the file cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {path}: it is there and is not a file")
    if not path.parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.parent}")
    phases = [list(group) for _, group in groupby(batches, lambda batch: {k: np.shape(v) for k, v in batch.items()})]
    if not phases:
        raise UsageError(f"no batches to write to {path}; ask for at least one step")
    arrays = {
        f"phase_{index}/{name}" if len(phases) > 1 else name: np.stack([batch[name] for batch in phase])
        for index, phase in enumerate(phases)
        for name in phase[0]
    }
    write_npz(path, arrays)
