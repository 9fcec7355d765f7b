"""Rows of running text, for masked LM without next-sentence prediction and for language models.

The rows of an epoch tile the split, so that each token is in exactly one row. Rows are consecutive spans of S - 2
tokens, starting at a random offset that changes every epoch. Rows ignore the ends of sentences and documents. In each
epoch, one row may be shorter, and one row may wrap around the end of the split.
"""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.assembly import TokenRows, mask_and_segments
from bertjax.data.pretraining.config import LANGUAGE_MODEL_BATCH, TILE_SPECIAL_TOKENS, Phase
from bertjax.data.pretraining.formatting import format_text_row
from bertjax.data.pretraining.masking import MASKED_LM
from bertjax.data.pretraining.rows import Spans, count_tiles, epoch_order, stream_key, tile_lookup
from bertjax.data.pretraining.source import OFFSET, ORDER, Lookup, RowFormat, RowSource
from bertjax.errors import UsageError


def _train(corpus: Corpus, phase: Phase, seed: int, passes: int, shuffle: bool) -> Lookup:
    tokens, width = _token_count(corpus, "train"), phase.seq_len - TILE_SPECIAL_TOKENS
    order_key, offset_key = (stream_key(seed, phase.start_step, purpose) for purpose in (ORDER, OFFSET))
    order = epoch_order(np.array([count_tiles(tokens, width)]), order_key, shuffle)
    tile = tile_lookup(tokens, width, offset_key)

    def lookup(positions: tf.Tensor) -> tuple[tf.Tensor, Spans]:
        row, epoch = order(positions)
        return row, tile(row, epoch)

    return lookup


def _heldout(corpus: Corpus, seq_len: int) -> tuple[int, Callable[[tf.Tensor], Spans]]:
    tokens, width = _token_count(corpus, "heldout"), seq_len - TILE_SPECIAL_TOKENS
    tile = tile_lookup(tokens, width, None)
    return count_tiles(tokens, width), lambda rows: tile(rows, tf.zeros_like(rows))


def _token_count(corpus: Corpus, split: str) -> int:
    tokens = len(getattr(corpus, split).tokens)
    if tokens == 0:
        raise UsageError(
            f"the {split} split of the corpus {corpus.path} is empty; prepare it again with "
            + ("a larger --heldout" if split == "heldout" else "more text")
        )
    return tokens


def _unmasked(*_: object) -> Callable[[TokenRows, Spans, tf.Tensor], dict[str, tf.Tensor]]:
    return lambda rows, spans, uniforms: {**mask_and_segments(rows), "input_ids": rows.ids}


_LANGUAGE_MODEL = RowFormat(
    schema=LANGUAGE_MODEL_BATCH,
    num_uniforms=lambda *_: 0,
    make_batch_function=_unmasked,
    format_row=format_text_row,
)
TILES, WHOLE_TILES = (RowSource(row_format, 1, False, _train, _heldout) for row_format in (MASKED_LM, _LANGUAGE_MODEL))
