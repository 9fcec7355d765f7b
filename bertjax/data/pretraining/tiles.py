"""Rows of consecutive text, for masked LM alone and for language models.

An epoch is a tiling: each token is in exactly one row. Its rows are spans of S - 2 consecutive tokens from another
random offset every epoch, which may run over the ends of sentences and documents; one of a pass is shorter, and one
joins the split's end to its start.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.assembly import Assembled, one_a_row
from bertjax.data.pretraining.config import LANGUAGE_MODEL_BATCH, SPECIAL_TOKENS_OF_TILE, Phase
from bertjax.data.pretraining.masking import MASKED_LM
from bertjax.data.pretraining.rows import Spans, epoch_order, stream_key, tile_count, tile_lookup
from bertjax.data.pretraining.source import OFFSET, ORDER, Lookup, Prediction, RowSource
from bertjax.errors import UsageError


def _train(corpus: Corpus, phase: Phase, seed: int, passes: int, shuffle: bool) -> Lookup:
    tokens, width = _token_count(corpus, "train"), phase.seq_len - SPECIAL_TOKENS_OF_TILE
    order_key, offset_key = (stream_key(seed, phase.start_step, purpose) for purpose in (ORDER, OFFSET))
    order = epoch_order(np.array([tile_count(tokens, width)]), order_key, shuffle)
    tile = tile_lookup(tokens, width, offset_key)

    def lookup(positions: tf.Tensor) -> tuple[tf.Tensor, Spans]:
        row, epoch = order(positions)
        return row, tile(row, epoch)

    return lookup


def _heldout(corpus: Corpus, seq_len: int) -> tuple[int, Callable[[tf.Tensor], Spans]]:
    tokens, width = _token_count(corpus, "heldout"), seq_len - SPECIAL_TOKENS_OF_TILE
    tile = tile_lookup(tokens, width, None)
    return tile_count(tokens, width), lambda rows: tile(rows, tf.zeros_like(rows))


def _token_count(corpus: Corpus, split: str) -> int:
    tokens = len(getattr(corpus, split).tokens)
    if tokens == 0:
        raise UsageError(
            f"the {split} split of the corpus {corpus.path} is empty; prepare it again with "
            + ("a larger --heldout" if split == "heldout" else "more text")
        )
    return tokens


def _as_they_are(*_: object) -> Callable[[Assembled, Spans, tf.Tensor], dict[str, tf.Tensor]]:
    return lambda rows, spans, uniforms: {**one_a_row(rows), "input_ids": rows.ids}


_EVERY_PIECE = Prediction(LANGUAGE_MODEL_BATCH, lambda *_: 0, _as_they_are)
TILES, WHOLE_TILES = (
    RowSource(prediction, 1, False, _train, _heldout, lambda *_: None, lambda *_: None)
    for prediction in (MASKED_LM, _EVERY_PIECE)
)
