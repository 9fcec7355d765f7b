"""Rows of any lengths to a model, in batches of like length and about equal size."""

from collections.abc import Iterator

import numpy as np

from bertjax.data.finetuning.examples import Batching, Examples, make_batch
from bertjax.data.shard import SINGLE_SHARD

# Of a batch with its padding: enough to keep a processor busy, little beside the parameters of BASE.
BATCH_TOKENS = 4096
_BUCKET = 32


def batches(examples: Examples, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Every example once, longest first; `example` says which one a row is, -1 is padding.

    Rows are padded to a multiple of 32 tokens, and there are as many of them as BATCH_TOKENS allows, so that a model is
    compiled once a length; the last batch may have fewer, a power of two.
    """
    batching = Batching(1, min(_BUCKET, seq_len), seq_len)
    order = np.argsort(-examples.lengths, kind="stable")
    start = 0
    while start < len(order):
        length = batching.padded_length(int(examples.lengths[order[start]]))
        rows = max(1, BATCH_TOKENS // (length * examples.sequences_per_example))
        chosen = order[start : start + rows]
        yield make_batch(examples, chosen, length, min(rows, 1 << (len(chosen) - 1).bit_length()), SINGLE_SHARD)
        start += rows
