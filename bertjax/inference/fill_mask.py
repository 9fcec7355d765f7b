"""Fills [MASK] in a sentence, to see within a minute what a checkpoint knows."""

from collections.abc import Sequence

import numpy as np

from bertjax.errors import UsageError
from bertjax.inference.trained_model import TrainedModel

_MASK = "[MASK]"
_BUCKET = 32


def check_texts(texts: Sequence[str], top: int) -> None:
    """Refuses what no checkpoint can fill.

    Raises:
      UsageError: there is a text without a mask, or nothing is asked for.
    """
    if top < 1:
        raise UsageError(f"--top is {top}; it must be at least 1")
    for text in texts:
        if _MASK not in text:
            raise UsageError(f"no {_MASK} in {text[:60]!r}; write one where a word is to be filled in")


def fill_mask(trained: TrainedModel, text: str, top: int) -> list[list[tuple[str, float]]]:
    """The most probable pieces at each [MASK] of a text.

    Args:
      trained: a model with a masked-LM head.
      text: holds [MASK] at least once.
      top: pieces a mask.

    Returns:
      For each mask, from the left, `top` pairs of piece and probability, best first.

    Raises:
      UsageError: there is no mask, the text is too long for the model, or the model has no masked-LM head.
    """
    check_texts([text], top)
    trained.check_parts("masked_lm")
    config, vocabulary = trained.config, trained.vocabulary
    if top > vocabulary.size:
        raise UsageError(f"--top is {top}; the vocabulary has {vocabulary.size} pieces")
    parts = text.split(_MASK)
    ids = [vocabulary.cls_id]
    for index, part in enumerate(parts):
        ids += [vocabulary.mask_id] * (index > 0) + trained.tokenizer.encode(part)
    ids.append(vocabulary.sep_id)
    if len(ids) > config.max_position_embeddings:
        raise UsageError(f"the text has {len(ids)} tokens, the model takes {config.max_position_embeddings}")
    # Texts of about one length are one compilation.
    length = min(config.max_position_embeddings, -(-len(ids) // _BUCKET) * _BUCKET)
    row = np.full((1, length), vocabulary.pad_id, np.int32)
    row[0, : len(ids)] = ids
    places = np.flatnonzero(np.array(ids) == vocabulary.mask_id)
    batch = {
        "input_ids": row,
        "segment_ids": np.zeros_like(row),
        "input_mask": (np.arange(length) < len(ids)).astype(np.int32)[None],
        "masked_lm_positions": places.astype(np.int32)[None],
    }
    (found,) = trained.masked_lm(batch)
    return [[(vocabulary.pieces[id_], float(row[id_])) for id_ in np.argsort(-row)[:top]] for row in found]
