"""Masked-word prediction for [MASK] in a text."""

from collections.abc import Sequence

import numpy as np

from bertjax.errors import UsageError
from bertjax.inference.loaded_model import LoadedModel

_MASK = "[MASK]"
_BUCKET = 32


def check_texts(texts: Sequence[str], top: int) -> None:
    """Raises a UsageError if a text has no [MASK] or `top` is below 1."""
    if top < 1:
        raise UsageError(f"top={top} is out of range; use at least 1")
    for text in texts:
        if _MASK not in text:
            raise UsageError(f"no {_MASK} in {text[:60]!r}; write {_MASK} in place of the word to predict")


def fill_mask(model: LoadedModel, text: str, top: int) -> list[list[tuple[str, float]]]:
    """Predicts the most probable tokens at each [MASK] of a text.

    Args:
      model: a model with a masked-LM head.
      text: a text with at least one [MASK].
      top: number of tokens per mask.

    Returns:
      For each mask, from left to right, `top` pairs of token and probability, best first.

    Raises:
      UsageError: the text has no mask or too many tokens, or the model has no masked-LM head.
    """
    check_texts([text], top)
    model.check_modules("masked_lm")
    vocabulary, max_len = model.vocabulary, model.config.max_position_embeddings
    if top > vocabulary.size:
        raise UsageError(f"top={top} is larger than the vocabulary; use at most {vocabulary.size}")
    ids = [vocabulary.cls_id, *model.tokenizer.encode_with_special(text), vocabulary.sep_id]
    if len(ids) > max_len:
        raise UsageError(f"the text has {len(ids)} tokens, but the model takes at most {max_len}; shorten the text")
    # Pad to a multiple of `_BUCKET`, so that texts of similar length share a compiled program.
    padded_len = min(max_len, -(-len(ids) // _BUCKET) * _BUCKET)
    input_ids = np.full((1, padded_len), vocabulary.pad_id, np.int32)
    input_ids[0, : len(ids)] = ids
    positions = np.flatnonzero(np.array(ids) == vocabulary.mask_id)
    batch = {
        "input_ids": input_ids,
        "segment_ids": np.zeros_like(input_ids),
        "input_mask": (np.arange(padded_len) < len(ids)).astype(np.int32)[None],
        "masked_lm_positions": positions.astype(np.int32)[None],
    }
    (probs,) = model.masked_lm_probs(batch)
    return [[(vocabulary.pieces[index], float(row[index])) for index in np.argsort(-row)[:top]] for row in probs]
