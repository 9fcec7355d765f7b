"""Hidden states and vectors of texts. Each row of a batch may contain several texts (packing)."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import numpy as np

from bertjax.data.finetuning.batches import NO_EXAMPLE, make_batch
from bertjax.data.finetuning.examples import Examples
from bertjax.data.shard import SINGLE_SHARD
from bertjax.inference.loaded_model import LoadedModel
from bertjax.model.config import ModelConfig
from bertjax.model.heads import Pooler
from bertjax.model.lstm import LEFT

CLS, MEAN = POOLINGS = ("cls", "mean")
# Row lengths are `_ROW_LEN` times powers of two, up to the model's maximum. Short texts share rows. Attention is slower
# in longer rows, but each row length compiles the encoder, which takes as long as encoding thousands of tokens. So a
# row length is used only for at least `_MIN_TOKENS` tokens. Other texts go to rows of the next larger length.
_ROW_LEN, _MIN_ROW_LEN = 64, 32
# Tokens per batch, small enough that activations fit into a CPU's cache. With 4,096 tokens per batch, a model of six
# layers takes 1.7 times as long per token.
_BATCH_TOKENS = 2048
_MIN_TOKENS = 4 * _BATCH_TOKENS


def encode_batches(model: LoadedModel, examples: Examples) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the indices of n examples, int64 [n], and the concatenated states of their tokens, float32 [tokens, D].

    The states come from the last layer. Examples are not in input order. All batches of a row length have the same
    shape, so the encoder compiles once per row length.
    """
    for indices, row_len in pack_batches(examples.lengths, model.config.max_row_tokens):
        batch = make_batch(examples, indices, row_len, SINGLE_SHARD)
        inputs = {name: batch[name] for name in ("input_ids", "segment_ids", "sequence_ids", "position_ids")}
        hidden = model.packed_hidden_states(inputs)
        yield indices[indices != NO_EXAMPLE], hidden[batch["sequence_ids"] > 0]


def pool(model: LoadedModel, hidden: np.ndarray, lengths: np.ndarray, pooling: str) -> np.ndarray:
    """Returns one vector per text, float32 [n, D]: the state of [CLS], or the mean over all tokens.

    `hidden` is float32 [tokens, D], the concatenated states of the n texts, and `lengths` is int64 [n]. `pooling` is
    `cls` or `mean`. For states that use left context only, `cls` selects the state of the last token, [SEP], because
    the state of [CLS] does not depend on the text.
    """
    starts = np.cumsum(lengths) - lengths
    if pooling == MEAN:
        return np.add.reduceat(hidden, starts, axis=0) / lengths[:, None].astype(np.float32)
    slices = zip(np.split(hidden, len(model.config.context_sides), axis=1), model.config.context_sides, strict=True)
    ends = starts + lengths - 1
    return np.concatenate([states[ends if side == LEFT else starts] for states, side in slices], axis=1)


def pooler_states(model: LoadedModel, hidden: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns pooled states, float32 [n, D], for a sequence-level output layer. Arguments are as in `pool`."""
    config = dataclasses.replace(model.config, dtype="float32")
    pooling = CLS if config.classifier_pooling == "cls" else MEAN
    is_late = config.classifier_pooling == "late"
    states = hidden if is_late else pool(model, hidden, lengths, pooling)
    # Pad to powers of two, because each shape is compiled once.
    padding = (1 << (len(states) - 1).bit_length()) - len(states)
    padded = np.pad(states, ((0, padding), (0, 0)))
    pooled = np.asarray(_compiled_pooler(config)({"params": model.params["pooler"]}, padded))[: len(states)]
    return pool(model, pooled, lengths, pooling) if is_late else pooled


@functools.cache
def _compiled_pooler(config: ModelConfig) -> Callable[..., jax.Array]:
    return jax.jit(Pooler(config).apply)


def pack_batches(lengths: np.ndarray, max_len: int) -> Iterator[tuple[np.ndarray, int]]:
    """Packs texts with `lengths` int64 [n] into batches with few distinct row lengths, at most `max_len`.

    Yields the indices of the texts in each row, int64 [rows, K] with `NO_EXAMPLE` if unused, and the row length.
    """
    row_lens = _row_lens(lengths, max_len)
    packed = _pack(lengths, row_lens)
    for row_len in row_lens:
        rows = [texts for length, texts in packed if length == row_len]
        num_rows = max(1, _BATCH_TOKENS // row_len)
        if len(rows) < num_rows:
            num_rows = 1 << (len(rows) - 1).bit_length()
        for start in range(0, len(rows), num_rows):
            batch = rows[start : start + num_rows]
            indices = np.full((num_rows, max(map(len, batch))), NO_EXAMPLE)
            for row, texts in enumerate(batch):
                indices[row, : len(texts)] = texts
            yield indices, row_len


def _row_lens(lengths: np.ndarray, max_len: int) -> list[int]:
    """Returns the row lengths for texts of `lengths` tokens, in increasing order."""
    if not len(lengths):
        return []
    if lengths.sum() <= _MIN_ROW_LEN:
        return [min(max_len, _MIN_ROW_LEN)]
    row_lens: list[int] = []
    row_len, longest = _ROW_LEN, int(lengths.max())
    while row_len < min(longest, max_len):
        shorter = row_lens[-1] if row_lens else 0
        if lengths[(lengths > shorter) & (lengths <= row_len)].sum() >= _MIN_TOKENS:
            row_lens.append(row_len)
        row_len *= 2
    return [*row_lens, min(row_len, max_len)]


def _pack(lengths: np.ndarray, row_lens: list[int]) -> list[tuple[int, list[int]]]:
    """Assigns texts to rows, longest first, each to the fullest row with enough space or to a new row.

    Returns length and text indices of each row.
    """
    rows: list[tuple[int, list[int]]] = []
    # `free[n]` lists the rows with n free tokens.
    free: list[list[int]] = [[] for _ in range(row_lens[-1] + 1)] if row_lens else []
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = min(int(lengths[index]), row_lens[-1])
        space = next((space for space in range(length, len(free)) if free[space]), None)
        if space is None:
            space = next(row_len for row_len in row_lens if row_len >= length)
            rows.append((space, []))
            free[space].append(len(rows) - 1)
        row = free[space].pop()
        rows[row][1].append(index)
        free[space - length].append(row)
    return rows
