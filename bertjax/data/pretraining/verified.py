"""Batches of nothing but verified data: what a run read of its corpus, held against the checksums before it ends."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from bertjax.data.corpus.blocks import blocks_of
from bertjax.data.corpus.store import Corpus, array_file
from bertjax.data.pretraining.config import Phase
from bertjax.data.pretraining.pairs import RECORD
from bertjax.data.pretraining.source import RowSource
from bertjax.errors import BertjaxError

_POSITIONS_AT_ONCE = 1 << 16


def watched(dataset: tf.data.Dataset, corpus: Corpus, verify: Callable[[int], None]) -> Iterator[dict[str, np.ndarray]]:
    """Yields a dataset's batches while the corpus is verified in the background.

    Args:
      verify: holds against its checksums what so many of the batches were made of.

    Raises:
      BertjaxError: a batch cannot be made; names the damage of the corpus where that is why.
    """
    corpus.verification.start()
    made = 0
    try:
        for batch in dataset.as_numpy_iterator():
            yield batch
            made += 1
    except tf.errors.OpError as error:
        verify(made + 1)
        reason = " ".join(str(error).split())[:200]
        raise BertjaxError(f"cannot make a batch of the corpus {corpus.path}: {reason}") from error


def verify_evaluation(corpus: Corpus, seq_len: int, source: RowSource) -> None:
    """Holds the held-out tokens against their checksums, and what else the rows were read from.

    Raises:
      BertjaxError: a block is damaged.
    """
    verification = corpus.verification
    verification.check()
    verification.verify(corpus.path / array_file("heldout", "tokens"))
    source.verify_heldout(corpus, seq_len)


def verify_training(
    corpus: Corpus,
    phases: tuple[Phase, ...],
    steps: int,
    *,
    source: RowSource,
    seed: int,
    dupe_factor: int,
    shuffle: bool = True,
) -> None:
    """Holds against its checksums all that the batches of steps 0 to `steps - 1` were made of.

    Args:
      phases: of the run.
      Others as in `pretraining.train_dataset`.

    Raises:
      BertjaxError: a block is damaged.
    """
    verification = corpus.verification
    verification.check()
    tokens = corpus.path / array_file("train", "tokens")
    for phase in phases:
        positions = max(0, min(steps, phase.stop_step) - phase.start_step) * phase.batch_size
        plan = source.train_plan(corpus, phase.seq_len, seed, dupe_factor)
        left = verification.left(tokens) + (verification.left(plan) if plan else 0)
        if not left or not positions:
            continue
        # So many random rows have touched most blocks, and to find out which would take longer than to verify them.
        if positions >= left:
            verification.verify(tokens)
            if plan:
                verification.verify(plan)
            continue
        lookup = source.train(corpus, phase, seed, dupe_factor, shuffle)
        for start in range(0, positions, _POSITIONS_AT_ONCE):
            rows, spans = lookup(tf.range(start, min(start + _POSITIONS_AT_ONCE, positions), dtype=tf.int64))
            verification.verify(tokens, _token_blocks(corpus, spans))
            if plan:
                verification.verify(plan, blocks_of(rows.numpy(), rows.numpy() + 1, RECORD.itemsize))


def _token_blocks(corpus: Corpus, spans: Any) -> np.ndarray:
    tokens = corpus.train.tokens
    starts = np.concatenate([spans.a_start.numpy(), spans.b_start.numpy()])
    stops = starts + np.concatenate([spans.a_length.numpy(), spans.b_length.numpy()])
    # A span of a tiling may go on at the start of the array.
    wrapped = np.maximum(0, stops - tokens.size)
    return np.union1d(
        blocks_of(starts, np.minimum(stops, tokens.size), tokens.itemsize),
        blocks_of(np.zeros_like(wrapped), wrapped, tokens.itemsize),
    )
