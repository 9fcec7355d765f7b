"""Output of `bertjax inspect`: rows of batches as text, and batches in `.npz` files."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.pretraining.config import PACKED_BATCH
from bertjax.data.schema import EXAMPLE, SEQUENCE, TOKEN_LABELS
from bertjax.errors import UsageError
from bertjax.utils.io import write_npz

_WIDTH = 120
_SPAN = ("start_positions", "end_positions")
_FORMATTED = {"labels", *_SPAN, *(spec.name for spec in (*SEQUENCE, *EXAMPLE, TOKEN_LABELS, *PACKED_BATCH))}


def write_batches(batches: Iterable[Mapping[str, np.ndarray]], path: str | Path) -> None:
    """Writes the batches of consecutive steps to one `.npz` file, atomically.

    The arrays of N batches are stacked to [N, ...]. If the batch shape changes, as between pre-training phases, each
    shape gets its own arrays: `phase_0/input_ids`, `phase_1/input_ids` and so on.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise UsageError(f"cannot write {path}: it exists and is not a file; choose another path")
    phases = [list(group) for _, group in groupby(batches, lambda batch: {k: np.shape(v) for k, v in batch.items()})]
    arrays = {
        f"phase_{index}/{name}" if len(phases) > 1 else name: np.stack([batch[name] for batch in phase])
        for index, phase in enumerate(phases)
        for name in phase[0]
    }
    write_npz(path, arrays)


def format_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary, labels: Sequence[str] = ()) -> str:
    """Formats a row of a pre-training or fine-tuning batch: the pieces of each segment, and the label or answer.

    A tagged piece is followed by the tag of its word, as in `jo/B-PER`. A predicted piece is followed by the original
    piece, or marked as kept: `[MASK]←paris`, `tree←paris (random)`, `paris (kept)`. `labels` lists the names of
    classes, tags or pair labels in the order of their ids; it is empty for regression, multiple choice, and rows
    without pairs.
    """
    ids, segment_ids = (batch[name][row].ravel() for name in ("input_ids", "segment_ids"))
    pieces, is_packed = [vocabulary.pieces[id_] for id_ in ids], "sequence_ids" in batch
    if is_packed:
        sequence_ids = batch["sequence_ids"][row]
    else:
        mask = np.atleast_2d(batch["input_mask"][row])
        sequence_ids = (mask * np.arange(1, len(mask) + 1)[:, None]).ravel()
    if "token_labels" in batch:
        tags = batch["token_labels"][row]
        pieces = [piece if tag < 0 else f"{piece}/{labels[tag]}" for piece, tag in zip(pieces, tags, strict=True)]
    size = f"{(sequence_ids > 0).sum()} tokens + {(sequence_ids == 0).sum()} padding"
    if "masked_lm_ids" in batch:
        used = batch["masked_lm_weights"][row] > 0
        size += f", {used.sum()} predictions"
        predictions = (batch[f"masked_lm_{name}"][row][used] for name in ("positions", "ids"))
        for position, original in zip(*predictions, strict=True):
            replaced = "" if ids[position] == vocabulary.mask_id else " (random)"
            suffix = f"←{vocabulary.pieces[original]}{replaced}"
            pieces[position] += " (kept)" if ids[position] == original else suffix
    lines, count = [size], int(sequence_ids.max(initial=0))
    for index in range(count):
        positions = np.flatnonzero(sequence_ids == index + 1)
        if count > 1:
            lines.append(f"sequence {index}, {positions.size} tokens")
        for segment, letter in enumerate("AB"):
            lines += _paragraph(f"{letter}: ", (pieces[i] for i in positions if segment_ids[i] == segment))
        if is_packed:
            lines += _format_label(batch, (row, index), labels)
    if not is_packed:
        lines += _format_label(batch, row, labels)
    if "start_positions" in batch:
        start, end = (int(batch[name][row]) for name in _SPAN)
        lines += _paragraph("answer: ", pieces[start : end + 1] if start else ["(not in this row)"])
    others = [name for name in batch if name not in _FORMATTED]
    lines += _paragraph("", (f"{name} {np.array2string(batch[name][row])}" for name in others))
    if "weights" in batch and not np.any(batch["weights"][row]):
        lines.append("weight 0: this is a padding row and does not count")
    return "\n".join(lines)


def _paragraph(head: str, words: Iterable[str]) -> list[str]:
    wrapper = textwrap.TextWrapper(_WIDTH, head, "   ", break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(" ".join(words))


def _format_label(batch: Mapping[str, np.ndarray], place: Any, names: Sequence[str]) -> list[str]:
    """Formats the label at index `place`: a class, number, multi-label vector, or the index of the correct sequence."""
    labels = batch.get("labels", batch.get("next_sentence_labels"))
    if labels is None:
        return []
    label = labels[place]
    if label.ndim:
        text = ", ".join(name for name, value in zip(names, label, strict=True) if value > 0) or "(none)"
    elif np.issubdtype(label.dtype, np.floating):
        text = f"{label:g}"
    elif label < 0:
        text = "(unknown)" if "labels" in batch else "(none)"
    else:
        text = names[int(label)] if names else f"sequence {label}"
    return _paragraph("label: ", [text])
