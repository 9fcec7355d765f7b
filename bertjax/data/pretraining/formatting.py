"""Rows of pre-training batches as text, for `bertjax inspect`."""

from collections.abc import Mapping, Sequence

import numpy as np

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.data.inspection import paragraph

_LABELS = {0: "IsNext", 1: "NotNext", -1: "no next sentence"}


def format_masked_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """Formats a row of one sentence pair or one text.

    Each segment is a paragraph. A predicted position shows the token that the model sees and the original token:
    `[MASK]←paris`, `tree←paris (random)`, `paris (kept)`. Padding is counted but not shown.

    Args:
      batch: batch of `MASKED_LM_BATCH`.
      row: index of the row.
      vocabulary: vocabulary of the corpus.
    """
    tokens, is_predicted = _format_tokens(batch, row, vocabulary)
    length = int(batch["input_mask"][row].sum())
    padding = len(tokens) - length
    label = _LABELS[int(batch["next_sentence_labels"][row])]
    head = f"{label}, {length} tokens + {padding} padding, {is_predicted[:length].sum()} predictions"
    return "\n".join([head, *_format_segments(tokens, batch["segment_ids"][row], np.arange(length))])


def format_packed_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """Formats a row of several sentence pairs, each in the format of `format_masked_row`.

    Args:
      batch: batch of `PACKED_BATCH`.
      row: index of the row.
      vocabulary: vocabulary of the corpus.
    """
    tokens, is_predicted = _format_tokens(batch, row, vocabulary)
    sequence_ids = batch["sequence_ids"][row]
    length, pairs = int((sequence_ids > 0).sum()), int(sequence_ids.max(initial=0))
    lines = [f"{pairs} {'pair' if pairs == 1 else 'pairs'}, {length} tokens + {len(tokens) - length} padding"]
    for number, label in enumerate(batch["next_sentence_labels"][row][:pairs], 1):
        positions = np.flatnonzero(sequence_ids == number)
        predictions = is_predicted[positions].sum()
        lines.append(f"{_LABELS[int(label)]}, {positions.size} tokens, {predictions} predictions")
        lines += _format_segments(tokens, batch["segment_ids"][row], positions)
    return "\n".join(lines)


def format_text_row(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> str:
    """Formats a row of text for a language model.

    Args:
      batch: batch of `LANGUAGE_MODEL_BATCH`.
      row: index of the row.
      vocabulary: vocabulary of the corpus.
    """
    ids, length = batch["input_ids"][row], int(batch["input_mask"][row].sum())
    head = f"{length} tokens + {len(ids) - length} padding, each predicted from its left or right context"
    return "\n".join([head, *paragraph("", " ".join(vocabulary.pieces[id_] for id_ in ids[:length]))])


def _format_tokens(batch: Mapping[str, np.ndarray], row: int, vocabulary: Vocabulary) -> tuple[list[str], np.ndarray]:
    """Formats each position of a row; returns the texts and whether each position is predicted, bool [S]."""
    ids = batch["input_ids"][row]
    used = batch["masked_lm_weights"][row] > 0
    positions, originals = batch["masked_lm_positions"][row][used], batch["masked_lm_ids"][row][used]
    tokens = [vocabulary.pieces[id_] for id_ in ids]
    for position, original in zip(positions.tolist(), originals.tolist(), strict=True):
        tokens[position] = _format_prediction(int(ids[position]), original, vocabulary)
    is_predicted = np.zeros(len(ids), bool)
    is_predicted[positions] = True
    return tokens, is_predicted


def _format_prediction(seen: int, original: int, vocabulary: Vocabulary) -> str:
    if seen == original:
        return f"{vocabulary.pieces[seen]} (kept)"
    suffix = "" if seen == vocabulary.mask_id else " (random)"
    return f"{vocabulary.pieces[seen]}←{vocabulary.pieces[original]}{suffix}"


def _format_segments(tokens: Sequence[str], segment_ids: np.ndarray, positions: np.ndarray) -> list[str]:
    """Wraps the two segments of a sequence as paragraphs A and B."""
    lines = []
    for segment, name in enumerate("AB"):
        text = " ".join(tokens[position] for position in positions if segment_ids[position] == segment)
        lines += paragraph(f"{name}: ", text)
    return lines
