"""A row of a fine-tuning batch as text: what the model will really see."""

from collections.abc import Mapping

import numpy as np

from bertjax.data.corpus.tokenizer import Vocabulary
from bertjax.data.npz import paragraph

_SHOWN = ("input_ids", "input_mask", "segment_ids")


def format_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """A row of a fine-tuning batch as text: its sequences by segment, then its labels.

    Args:
      batch: as `plan.train_batches` makes them.
      row: of the batch.
      vocabulary: the tokenizer's.
    """
    if "sequence_ids" in batch:
        of = batch["sequence_ids"][row]
        name, mask = "example", of == 1 + np.arange(of.max(initial=0))[:, None]
        ids, segment_ids = (np.broadcast_to(batch[each][row], mask.shape) for each in ("input_ids", "segment_ids"))
        lines = [f"{len(mask)} {name}{'s' * (len(mask) != 1)}, {mask.sum()} tokens + {(of == 0).sum()} padding"]
    else:
        ids, mask, segment_ids = (np.atleast_2d(batch[each][row]) for each in _SHOWN)
        name, mask, lines = "choice", mask > 0, []
    for sequence, (tokens, inside, segments) in enumerate(zip(ids, mask, segment_ids, strict=True)):
        told = f"{name} {sequence}, " if len(ids) > 1 else ""
        behind = "" if "sequence_ids" in batch else f" + {(~inside).sum()} padding"
        lines.append(f"{told}{inside.sum()} tokens{behind}")
        for segment, letter in enumerate("AB"):
            pieces = [vocabulary.pieces[token] for token in tokens[inside & (segments == segment)]]
            lines += paragraph(f"{letter}: ", " ".join(pieces))
    rest = {each: values for each, values in batch.items() if each not in (*_SHOWN, "sequence_ids", "position_ids")}
    lines += paragraph("", "  ".join(f"{each} {np.array2string(values[row])}" for each, values in rest.items()))
    return "\n".join(lines)
