"""Output of `bertjax inspect`: rows of batches as text, and batches in `.npz` files."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.schema import EXAMPLE, SEQUENCE, TOKEN_LABELS
from bertjax.errors import UsageError
from bertjax.utils.io import write_npz

_WIDTH = 120
_INPUTS = ("sequence_ids", "position_ids", *(spec.name for spec in (*SEQUENCE, *EXAMPLE, TOKEN_LABELS)))
_SPAN = ("start_positions", "end_positions")


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
        raise UsageError(f"cannot write {path}: no folder {path.parent}; create it first")
    phases = [list(group) for _, group in groupby(batches, lambda batch: {k: np.shape(v) for k, v in batch.items()})]
    arrays = {
        f"phase_{index}/{name}" if len(phases) > 1 else name: np.stack([batch[name] for batch in phase])
        for index, phase in enumerate(phases)
        for name in phase[0]
    }
    write_npz(path, arrays)


def format_row(batch: Mapping[str, np.ndarray], row: int, tokenizer: Tokenizer, labels: Sequence[str] = ()) -> str:
    """Formats a row of a fine-tuning batch as text: each example's word pieces by segment, and its label or answer.

    A tagged piece is followed by the tag of its word, as in `jo/B-PER`. `labels` lists the class or tag names in the
    order of their ids; it is empty for regression and multiple choice.
    """
    pieces = tokenizer.pieces(batch["input_ids"][row].reshape(-1))
    if "token_labels" in batch:
        tags = batch["token_labels"][row]
        pieces = [piece if tag < 0 else f"{piece}/{labels[tag]}" for piece, tag in zip(pieces, tags, strict=True)]
    is_packed = "sequence_ids" in batch
    if is_packed:
        sequence_ids = batch["sequence_ids"][row]
        mask = sequence_ids == 1 + np.arange(sequence_ids.max(initial=0))[:, None]  # [examples, L]
        segment_ids = np.broadcast_to(batch["segment_ids"][row], mask.shape)
        texts = [pieces] * len(mask)
        noun = "example" if len(mask) == 1 else "examples"
        lines = [f"{len(mask)} {noun}, {mask.sum()} tokens + {(sequence_ids == 0).sum()} padding"]
    else:
        mask, segment_ids = (np.atleast_2d(batch[name][row]) for name in ("input_mask", "segment_ids"))
        mask, lines = mask > 0, []
        texts = [pieces[start : start + mask.shape[1]] for start in range(0, len(pieces), mask.shape[1])]
    for index, (text, inside, segments) in enumerate(zip(texts, mask, segment_ids, strict=True)):
        head = f"{'example' if is_packed else 'sequence'} {index}, " if len(mask) > 1 else ""
        padding = "" if is_packed else f" + {(~inside).sum()} padding"
        lines.append(f"{head}{inside.sum()} tokens{padding}")
        for segment, letter in enumerate("AB"):
            lines += paragraph(f"{letter}: ", " ".join(text[i] for i in np.flatnonzero(inside & (segments == segment))))
        if is_packed and "labels" in batch:
            lines += paragraph("", f"label: {_format_label(batch['labels'][row, index], labels)}")
    if "labels" in batch and not is_packed:
        lines += paragraph("", f"label: {_format_label(batch['labels'][row], labels)}")
    if "start_positions" in batch:
        start, end = (int(batch[name][row]) for name in _SPAN)
        answer = tokenizer.decode(batch["input_ids"][row, start : end + 1].tolist()) if start else "(not in this row)"
        lines += paragraph("", f"answer: {answer}")
    others = [name for name in batch if name not in (*_INPUTS, *_SPAN, "labels")]
    lines += paragraph("", "  ".join(f"{name} {np.array2string(batch[name][row])}" for name in others))
    if not np.any(batch["weights"][row]):
        lines.append("weight 0: this is a padding row and does not count")
    return "\n".join(lines)


def format_masked_row(labels: Sequence[str], batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """Formats a row of a `MASKED_LM_BATCH` (one pair or text) or of a `PACKED_BATCH` (several pairs or documents).

    Each segment is a paragraph. A predicted position shows the token that the model sees and the original token:
    `[MASK]←paris`, `tree←paris (random)`, `paris (kept)`. Padding is counted but not shown. `labels` lists the names of
    pair labels in the order of their ids; it is empty for texts and documents.
    """
    names = {-1: "no label", **dict(enumerate(labels))}
    ids, used = batch["input_ids"][row], batch["masked_lm_weights"][row] > 0
    predicted, originals = (batch[f"masked_lm_{name}"][row][used] for name in ("positions", "ids"))
    tokens = [vocabulary.pieces[id_] for id_ in ids]
    for position, original in zip(predicted, originals, strict=True):
        if ids[position] == original:
            tokens[position] += " (kept)"
        else:
            suffix = "" if ids[position] == vocabulary.mask_id else " (random)"
            tokens[position] += f"←{vocabulary.pieces[original]}{suffix}"
    is_packed = "sequence_ids" in batch
    sequence_ids = batch["sequence_ids" if is_packed else "input_mask"][row]
    padding = f" + {(sequence_ids == 0).sum()} padding"
    pairs = int(sequence_ids.max(initial=0)) if is_packed else 1
    noun = "pair" if labels else "document"
    lines = [f"{pairs} {noun}{'s' * (pairs != 1)}, {(sequence_ids > 0).sum()} tokens{padding}"] if is_packed else []
    for number, label in enumerate(np.atleast_1d(batch["next_sentence_labels"][row])[:pairs], 1):
        positions = np.flatnonzero(sequence_ids == number)
        size = f"{positions.size} tokens{'' if is_packed else padding}"
        lines.append(f"{names[int(label)]}, {size}, {np.isin(predicted, positions).sum()} predictions")
        for segment, name in enumerate("AB"):
            text = " ".join(tokens[i] for i in positions if batch["segment_ids"][row, i] == segment)
            lines += paragraph(f"{name}: ", text)
    return "\n".join(lines)


def format_unmasked_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """Formats a row of a `LANGUAGE_MODEL_BATCH`, which contains text without masks."""
    ids, length = batch["input_ids"][row], int(batch["input_mask"][row].sum())
    head = f"{length} tokens + {len(ids) - length} padding, each predicted from its left or right context"
    return "\n".join([head, *paragraph("", " ".join(vocabulary.pieces[id_] for id_ in ids[:length]))])


def _format_label(label: np.ndarray, names: Sequence[str]) -> str:
    """Formats a class id, a regression value, a multi-label 0/1 vector, or the index of the correct sequence."""
    if label.ndim:
        return ", ".join(name for name, value in zip(names, label, strict=True) if value > 0) or "(none)"
    if np.issubdtype(label.dtype, np.floating):
        return f"{label:g}"
    if label < 0:
        return "(unknown)"
    return names[int(label)] if names else f"sequence {label}"
