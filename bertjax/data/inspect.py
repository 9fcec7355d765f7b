"""What the model will really see: batches as text and as `.npz` files."""

import textwrap
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

import numpy as np

from bertjax.corpus.tokenizer import Vocabulary
from bertjax.errors import UsageError
from bertjax.files import write_arrays

_LABELS = {0: "IsNext", 1: "NotNext", -1: "no next sentence"}
_WIDTH = 120


def format_example(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """One row of a pre-training batch as text.

    Segments stand on paragraphs of their own. A masked position shows what the model sees, then what stood there:
    `[MASK]←paris`, `tree←paris (random)`, `paris (kept)`. Padding is only counted.

    Args:
      batch: as `pretraining.train_dataset` makes them.
      row: of the batch.
      vocabulary: the corpus's.
    """
    ids, segment_ids = batch["input_ids"][row], batch["segment_ids"][row]
    length = int(batch["input_mask"][row].sum())
    weights = batch["masked_lm_weights"][row] > 0
    originals = dict(
        zip(
            batch["masked_lm_positions"][row][weights].tolist(),
            batch["masked_lm_ids"][row][weights].tolist(),
            strict=True,
        )
    )
    shown = [_shown(int(ids[p]), originals.get(p), vocabulary) for p in range(length)]
    head = (
        f"{_LABELS[int(batch['next_sentence_labels'][row])]}, {length} tokens + {len(ids) - length} padding, "
        f"{len(originals)} predictions"
    )
    lines = [head]
    for segment, name in enumerate("AB"):
        text = " ".join(shown[p] for p in range(length) if segment_ids[p] == segment)
        lines += _wrapped(f"{name}: ", text)
    return "\n".join(lines)


def format_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """One example of a fine-tuning batch as text: its sequences by segment, then its labels.

    Args:
      batch: as `examples.assemble` makes them.
      row: of the batch.
      vocabulary: the tokenizer's.
    """
    ids, mask, segment_ids = (np.atleast_2d(batch[name][row]) for name in ("input_ids", "input_mask", "segment_ids"))
    lines = []
    for sequence, (tokens, inside, segments) in enumerate(zip(ids, mask > 0, segment_ids, strict=True)):
        choice = f"choice {sequence}, " if len(ids) > 1 else ""
        lines.append(f"{choice}{inside.sum()} tokens + {(~inside).sum()} padding")
        for segment, name in enumerate("AB"):
            pieces = [vocabulary.pieces[token] for token in tokens[inside & (segments == segment)]]
            lines += _wrapped(f"{name}: ", " ".join(pieces))
    told = {name: values for name, values in batch.items() if name not in ("input_ids", "input_mask", "segment_ids")}
    lines += _wrapped("", "  ".join(f"{name} {np.array2string(values[row])}" for name, values in told.items()))
    return "\n".join(lines)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent="   ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _shown(seen: int, original: int | None, vocabulary: Vocabulary) -> str:
    piece = vocabulary.pieces[seen]
    if original is None:
        return piece
    if seen == original:
        return f"{piece} (kept)"
    return f"{piece}←{vocabulary.pieces[original]}" + ("" if seen == vocabulary.mask_id else " (random)")


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
    write_arrays(path, arrays)
