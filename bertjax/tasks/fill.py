"""Fills [MASK] in a sentence, to see within a minute what a checkpoint knows."""

from typing import Any

import jax
import numpy as np

from bertjax.corpus.tokenizer import Tokenizer, Vocabulary
from bertjax.errors import UsageError
from bertjax.model.heads import PretrainingModel

_MASK = "[MASK]"


def fill(
    model: PretrainingModel, params: Any, vocabulary: Vocabulary, text: str, top: int
) -> list[list[tuple[str, float]]]:
    """The most probable pieces at each [MASK] of a text.

    Args:
      model, params: of a checkpoint.
      vocabulary: its vocabulary.
      text: holds [MASK] at least once.
      top: pieces a mask.

    Returns:
      For each mask, from the left, `top` pairs of piece and probability, best first.

    Raises:
      UsageError: there is no mask, or the text is too long for the model.
    """
    if not 1 <= top <= vocabulary.size:
        raise UsageError(f"--top is {top}; it must be between 1 and the vocabulary's {vocabulary.size}")
    parts = text.split(_MASK)
    if len(parts) == 1:
        raise UsageError(f"no {_MASK} in {text[:60]!r}; write one where a word is to be filled in")
    tokenizer = Tokenizer(vocabulary)
    ids = [vocabulary.cls_id]
    for index, part in enumerate(parts):
        ids += [vocabulary.mask_id] * (index > 0) + tokenizer.encode(part)
    ids.append(vocabulary.sep_id)
    if len(ids) > model.config.max_positions:
        raise UsageError(f"the text has {len(ids)} tokens, the model takes {model.config.max_positions}")
    row = np.array([ids], np.int32)
    batch = {
        "input_ids": row,
        "input_mask": np.ones_like(row),
        "segment_ids": np.zeros_like(row),
        "masked_lm_positions": np.flatnonzero(row[0] == vocabulary.mask_id)[None].astype(np.int32),
    }
    logits, _ = jax.jit(model.apply)({"params": params}, batch)
    probabilities = np.asarray(jax.nn.softmax(logits[0]))  # [P, V]
    return [[(vocabulary.pieces[id_], float(row[id_])) for id_ in np.argsort(-row)[:top]] for row in probabilities]
