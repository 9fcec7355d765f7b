"""Contextual embeddings of texts, from any layer (section 5.3 of the paper)."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bertjax.corpus.tokenizer import Tokenizer, Vocabulary
from bertjax.data.examples import encode_pair
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.encoder import Encoder

_BATCH_SIZE = 32
_PAIR = " ||| "


def features(
    config: ModelConfig, params: Any, vocabulary: Vocabulary, texts: Sequence[str], layers: Sequence[int], seq_len: int
) -> dict[str, np.ndarray]:
    """Hidden states of texts; a text with ` ||| ` in it is a pair.

    Args:
      config: of the model.
      params: its `encoder`.
      vocabulary: its vocabulary.
      texts: T of them.
      layers: C of them; 0 is the embeddings, 1 to N the layers, negative ones count from the last.
      seq_len: tokens a row at most; what is longer is cut.

    Returns:
      `hidden_states` float32 [T, C, L, D], and `input_ids`, `input_mask`, `segment_ids` int32 [T, L]; L is the length
      of the longest row.

    Raises:
      UsageError: there is no such layer, rows are too long for the model, or it takes no pairs.
    """
    count = config.num_layers + 1
    wrong = [layer for layer in layers if not -count <= layer < count]
    if wrong or not layers:
        raise UsageError(f"--layers has {wrong or 'none'}; they go from 0, the embeddings, to {config.num_layers}")
    if not 8 <= seq_len <= config.max_positions:
        raise UsageError(f"--seq_len is {seq_len}; it must be between 8 and the model's {config.max_positions}")
    tokenizer = Tokenizer(vocabulary)
    rows = []
    for text in texts:
        first, *second = (tokenizer.encode(part) for part in text.split(_PAIR, 1))
        pair = second[0] if second else None
        if pair is not None and config.num_segments < 2:
            raise UsageError(f"{text[:60]!r} is a pair, and the model has one segment")
        rows.append(encode_pair(first, pair, seq_len, vocabulary.cls_id, vocabulary.sep_id))
    length = max(len(row["input_ids"]) for row in rows)
    batch = {
        "input_ids": np.full((len(rows), length), vocabulary.pad_id, np.int32),
        "input_mask": np.zeros((len(rows), length), np.int32),
        "segment_ids": np.zeros((len(rows), length), np.int32),
    }
    for index, row in enumerate(rows):
        here = slice(len(row["input_ids"]))
        batch["input_ids"][index, here], batch["input_mask"][index, here] = row["input_ids"], 1
        batch["segment_ids"][index, here] = row["segment_ids"]
    chosen = np.array(layers)

    @jax.jit
    def hidden_states(params: Any, ids: jax.Array, segments: jax.Array, mask: jax.Array) -> jax.Array:
        _, states = Encoder(config).apply({"params": params}, ids, segments, mask, collect_layers=True)
        return states[chosen].swapaxes(0, 1).astype(np.float32)

    found = []
    for start in range(0, len(rows), _BATCH_SIZE):
        part = [batch[name][start : start + _BATCH_SIZE] for name in ("input_ids", "segment_ids", "input_mask")]
        found.append(np.asarray(hidden_states(params["encoder"], *part)))
    return {"hidden_states": np.concatenate(found), **batch}
