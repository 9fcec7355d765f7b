"""A row of a pre-training batch as text: what the model will really see."""

from collections.abc import Mapping

import numpy as np

from bertjax.data.corpus.tokenizer import Vocabulary
from bertjax.data.npz import paragraph

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
    # As `input_mask`, which tells a single sequence.
    sequence_ids = batch["sequence_ids" if "sequence_ids" in batch else "input_mask"][row]
    length = int((sequence_ids > 0).sum())
    padding = len(ids) - length
    if "masked_lm_ids" not in batch:
        head = f"{length} tokens + {padding} padding, each predicted from those on one side of it"
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
    lines = []
    sequences = int(sequence_ids.max(initial=0))
    if "sequence_ids" in batch:
        lines.append(f"{sequences} {'pair' if sequences == 1 else 'pairs'}, {length} tokens + {padding} padding")
    for number, label in enumerate(np.atleast_1d(batch["next_sentence_labels"][row])[: max(1, sequences)], 1):
        here = np.flatnonzero(sequence_ids == number)
        behind = "" if "sequence_ids" in batch else f" + {padding} padding"
        predictions = sum(p in originals for p in here.tolist())
        lines.append(f"{_LABELS[int(label)]}, {here.size} tokens{behind}, {predictions} predictions")
        for segment, name in enumerate("AB"):
            text = " ".join(shown[p] for p in here if segment_ids[p] == segment)
            lines += paragraph(f"{name}: ", text)
    return "\n".join(lines)


def _shown(seen: int, original: int | None, vocabulary: Vocabulary) -> str:
    piece = vocabulary.pieces[seen]
    if original is None:
        return piece
    if seen == original:
        return f"{piece} (kept)"
    return f"{piece}←{vocabulary.pieces[original]}" + ("" if seen == vocabulary.mask_id else " (random)")
