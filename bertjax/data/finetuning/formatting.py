"""Rows of fine-tuning batches as text, for `bertjax inspect`."""

from collections.abc import Mapping

import numpy as np

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.npz import paragraph

_INPUTS = ("input_ids", "input_mask", "segment_ids", "sequence_ids", "position_ids")


def format_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """Formats a row of a fine-tuning batch: the word pieces of each sequence by segment, then the labels.

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
