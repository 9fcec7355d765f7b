"""Hidden states and vectors of texts. Each row of a batch can hold several texts (packing)."""

from collections.abc import Iterator

import jax
import numpy as np

from bertjax.data.finetuning.batches import NO_EXAMPLE, make_packed_batch
from bertjax.data.finetuning.examples import Examples
from bertjax.data.shard import SINGLE_SHARD
from bertjax.inference.loaded_model import LoadedModel
from bertjax.model.lstm import LEFT

CLS, MEAN = POOLINGS = ("cls", "mean")
# Row length: the longest text, or `_ROW_LEN` if that is longer and the texts fill it, so that short texts share rows.
# Longer rows would slow attention. The length is rounded up to a multiple of `_BUCKET`, up to the model's maximum.
_BUCKET, _ROW_LEN = 32, 64
# Tokens per batch, so that activations fit into a CPU's cache. With 4,096 tokens per batch, a model of six layers takes
# 1.7 times as long per token.
_BATCH_TOKENS = 2048


def encode_batches(model: LoadedModel, examples: Examples) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the hidden states of the last layer, batch by batch, but not in the order of the examples.

    All batches have the same shape, so that the encoder compiles once.

    Yields:
      The indices of n examples, int64 [n], and the concatenated states of their tokens, float32 [tokens, D].
    """
    for indices, row_len in pack_batches(examples.lengths, model.config.max_position_embeddings):
        batch = make_packed_batch(examples, indices, row_len, SINGLE_SHARD)
        inputs = {name: batch[name] for name in ("input_ids", "segment_ids", "sequence_ids", "position_ids")}
        hidden = model.packed_hidden_states(inputs)
        yield indices[indices != NO_EXAMPLE], hidden[batch["sequence_ids"] > 0]


def pool(model: LoadedModel, hidden: np.ndarray, lengths: np.ndarray, pooling: str) -> np.ndarray:
    """Returns one vector per text, float32 [n, D]: the state of [CLS], or the mean of the states of all tokens.

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


def bert_pooler(model: LoadedModel, cls: np.ndarray) -> np.ndarray:
    """Applies BERT's pooler to the states of [CLS]: float32 [n, D] to [n, D]."""
    dense = jax.device_get(model.params["pooler"]["dense"])
    return np.tanh(cls @ np.asarray(dense["kernel"], np.float32) + np.asarray(dense["bias"], np.float32))


def pack_batches(lengths: np.ndarray, max_len: int) -> Iterator[tuple[np.ndarray, int]]:
    """Packs n texts of `lengths` tokens, int64 [n], into batches. All rows have the same length, at most `max_len`.

    Yields:
      For each batch, the indices of the texts in each row, int64 [rows, K] with `NO_EXAMPLE` in unused slots, and the
      row length in tokens.
    """
    if not len(lengths):
        return
    needed = max(int(lengths.max()), min(_ROW_LEN, int(lengths.sum())))
    row_len = min(max_len, -(-needed // _BUCKET) * _BUCKET)
    rows = _pack(lengths, row_len)
    num_rows = max(1, _BATCH_TOKENS // row_len)
    if len(rows) < num_rows:
        num_rows = 1 << (len(rows) - 1).bit_length()
    for start in range(0, len(rows), num_rows):
        batch = rows[start : start + num_rows]
        indices = np.full((num_rows, max(map(len, batch))), NO_EXAMPLE)
        for row, texts in enumerate(batch):
            indices[row, : len(texts)] = texts
        yield indices, row_len


def _pack(lengths: np.ndarray, row_len: int) -> list[list[int]]:
    """Assigns texts to rows, longest first, each to the fullest row with enough space."""
    rows: list[list[int]] = []
    # `free[n]` lists the rows with n free tokens.
    free: list[list[int]] = [[] for _ in range(row_len + 1)]
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = min(int(lengths[index]), row_len)
        space = next((space for space in range(length, row_len + 1) if free[space]), None)
        if space is None:
            rows.append([index])
            free[row_len - length].append(len(rows) - 1)
        else:
            row = free[space].pop()
            rows[row].append(index)
            free[space - length].append(row)
    return rows
