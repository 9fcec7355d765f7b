"""A row of a pre-training batch as text: what the model will really see."""

from collections.abc import Mapping

import numpy as np

from bertjax.corpus.tokenizer import Vocabulary
from bertjax.data.showing import paragraph

_LABELS = {0: "IsNext", 1: "NotNext", -1: "no next sentence"}


def format_example(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """One row of a pre-training batch as text.

    Segments stand on paragraphs of their own. A masked position shows what the model sees, then what stood there:
    `[MASK]←paris`, `tree←paris (random)`, `paris (kept)`. Padding is only counted.

    Args:
      batch: as `batches.train_dataset` makes them.
      row: of the batch.
      vocabulary: the corpus's.
    """
    ids, segment_ids = batch["input_ids"][row], batch["segment_ids"][row]
    length = int(batch["input_mask"][row].sum())
    if "masked_lm_ids" not in batch:
        head = f"{length} tokens + {len(ids) - length} padding, each predicted from those on one side of it"
        return "\n".join([head, *paragraph("", " ".join(vocabulary.pieces[id_] for id_ in ids[:length]))])
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
        lines += paragraph(f"{name}: ", text)
    return "\n".join(lines)


def _shown(seen: int, original: int | None, vocabulary: Vocabulary) -> str:
    piece = vocabulary.pieces[seen]
    if original is None:
        return piece
    if seen == original:
        return f"{piece} (kept)"
    return f"{piece}←{vocabulary.pieces[original]}" + ("" if seen == vocabulary.mask_id else " (random)")
