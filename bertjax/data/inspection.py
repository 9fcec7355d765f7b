"""Output of `bertjax inspect`: formatted rows of fine-tuning batches, and batches in `.npz` files."""

import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np

from bertjax.data.corpus.vocabulary import Vocabulary
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

    The arrays of N batches are stacked to [N, ...]. If the batch shape changes, as between pre-training phases, each
    shape gets its own arrays: `phase_0/input_ids`, `phase_1/input_ids` and so on.
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


_INPUTS = ("input_ids", "input_mask", "segment_ids", "sequence_ids", "position_ids")


def format_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """Formats a row of a fine-tuning batch as text: the word pieces of each segment, then the labels.

    Args:
      batch: a batch of `train_batches` or `eval_batches`.
      row: index of the row.
      vocabulary: maps token ids to word pieces.
    """
    is_packed = "sequence_ids" in batch
    if is_packed:
        sequence_ids = batch["sequence_ids"][row]
        mask = sequence_ids == 1 + np.arange(sequence_ids.max(initial=0))[:, None]  # [examples, L]
        ids, segment_ids = (np.broadcast_to(batch[name][row], mask.shape) for name in ("input_ids", "segment_ids"))
        noun = "example" if len(mask) == 1 else "examples"
        lines = [f"{len(mask)} {noun}, {mask.sum()} tokens + {(sequence_ids == 0).sum()} padding"]
    else:
        ids, mask, segment_ids = (
            np.atleast_2d(batch[name][row]) for name in ("input_ids", "input_mask", "segment_ids")
        )
        mask, lines = mask > 0, []
    for index, (sequence, inside, segments) in enumerate(zip(ids, mask, segment_ids, strict=True)):
        head = f"{'example' if is_packed else 'sequence'} {index}, " if len(ids) > 1 else ""
        padding = "" if is_packed else f" + {(~inside).sum()} padding"
        lines.append(f"{head}{inside.sum()} tokens{padding}")
        for segment, letter in enumerate("AB"):
            pieces = [vocabulary.pieces[token] for token in sequence[inside & (segments == segment)]]
            lines += paragraph(f"{letter}: ", " ".join(pieces))
    labels = {name: values[row] for name, values in batch.items() if name not in _INPUTS}
    lines += paragraph("", "  ".join(f"{name} {np.array2string(value)}" for name, value in labels.items()))
    return "\n".join(lines)
