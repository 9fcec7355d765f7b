"""Fills [MASK] in a sentence, to see within a minute what a checkpoint knows."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bertjax.corpus.tokenizer import Tokenizer, Vocabulary
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import Encoder
from bertjax.model.heads import MaskedLmHead

_MASK = "[MASK]"


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


def fill(
    config: ModelConfig, params: Any, vocabulary: Vocabulary, text: str, top: int
) -> list[list[tuple[str, float]]]:
    """The most probable pieces at each [MASK] of a text.

    Args:
      config: of the model.
      params: its `encoder` and `masked_lm`.
      vocabulary: its vocabulary.
      text: holds [MASK] at least once.
      top: pieces a mask.

    Returns:
      For each mask, from the left, `top` pairs of piece and probability, best first.

    Raises:
      UsageError: there is no mask, or the text is too long for the model.
    """
    check_texts([text], top)
    if top > vocabulary.size:
        raise UsageError(f"--top is {top}; the vocabulary has {vocabulary.size} pieces")
    parts = text.split(_MASK)
    tokenizer = Tokenizer(vocabulary)
    ids = [vocabulary.cls_id]
    for index, part in enumerate(parts):
        ids += [vocabulary.mask_id] * (index > 0) + tokenizer.encode(part)
    ids.append(vocabulary.sep_id)
    if len(ids) > config.max_positions:
        raise UsageError(f"the text has {len(ids)} tokens, the model takes {config.max_positions}")
    row = np.array([ids], np.int32)

    @jax.jit
    def probabilities(params: Any) -> jax.Array:
        hidden, _ = Encoder(config).apply(
            {"params": params["encoder"]}, row, np.zeros_like(row), np.ones_like(row)
        )  # [1, L, D]
        masked = hidden[:, np.flatnonzero(row[0] == vocabulary.mask_id)]  # [1, P, D]
        table = params["encoder"]["embeddings"]["token"]
        return jax.nn.softmax(MaskedLmHead(config).apply({"params": params["masked_lm"]}, masked, table)[0])

    found = np.asarray(probabilities(params))  # [P, V]
    return [[(vocabulary.pieces[id_], float(row[id_])) for id_ in np.argsort(-row)[:top]] for row in found]
