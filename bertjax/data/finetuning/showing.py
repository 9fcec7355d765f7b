"""An example of a fine-tuning batch as text: what the model will really see."""

from collections.abc import Mapping

import numpy as np

from bertjax.corpus.tokenizer import Vocabulary
from bertjax.data.showing import paragraph


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
            lines += paragraph(f"{name}: ", " ".join(pieces))
    told = {name: values for name, values in batch.items() if name not in ("input_ids", "input_mask", "segment_ids")}
    lines += paragraph("", "  ".join(f"{name} {np.array2string(values[row])}" for name, values in told.items()))
    return "\n".join(lines)
