"""How fast pre-training batches are made."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.batches import train_dataset
from bertjax.data.pretraining.config import Masking, Phase
from bertjax.data.pretraining.source import RowSource
from bertjax.data.pretraining.verified import verify_training, watched
from bertjax.data.schema import is_token
from bertjax.data.shard import SINGLE_SHARD
from bertjax.errors import UsageError

_WARM_UP_BATCHES = 10
_ROUNDS = 2


def bench_input(
    corpus: Corpus,
    phase: Phase,
    *,
    source: RowSource,
    masking: Masking,
    seed: int,
    dupe_factor: int,
    seconds: float = 10.0,
    parallel_calls: int | None = None,
) -> dict[str, Any]:
    """Measures the training input by iterating over it, in training's order and, in turns, in the corpus's order.

    Args:
      phase: shape of the batch; its steps do not matter.
      seconds: for each of the two orders.
      Others as in `pretraining.train_dataset`.

    Returns:
      real_tokens_per_second: in training's order, without padding.
      positions_per_second: with padding.
      sequential_positions_per_second: the same with neighbouring rows from neighbouring places of the corpus.
      random_access_cost: share of the sequential rate lost to training's order.
      seconds_to_first_batch: with the pair plan, whether made or read.
      batches, seconds: measured in training's order.
      fill: share of positions that are not padding, of the first batches.
      seq_len, batch_size: of the phase.

    Raises:
      UsageError, BertjaxError: as `pretraining.train_dataset`; also, the corpus is damaged.
    """
    # More steps than any measurement reaches.
    phase = dataclasses.replace(phase, start_step=0, stop_step=1 << 40)

    def batches(shuffle: bool) -> Iterator[dict[str, np.ndarray]]:
        dataset = train_dataset(
            corpus,
            phase,
            source=source,
            masking=masking,
            seed=seed,
            dupe_factor=dupe_factor,
            start_step=0,
            share=SINGLE_SHARD,
            parallel_calls=parallel_calls,
            shuffle=shuffle,
        )
        return watched(dataset, corpus, lambda made: verify(made, shuffle))

    def verify(steps: int, shuffle: bool) -> None:
        verify_training(corpus, (phase,), steps, source=source, seed=seed, dupe_factor=dupe_factor, shuffle=shuffle)

    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds is {seconds}; it must be above 0 and at most 3600")
    started = time.perf_counter()
    stream = batches(shuffle=True)
    first_batches = [next(stream)]
    seconds_to_first_batch = time.perf_counter() - started
    first_batches += itertools.islice(stream, _WARM_UP_BATCHES)
    fill = float(np.mean([is_token(batch).mean() for batch in first_batches]))
    del stream

    count, spent = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    # In turns, so that other work on the machine slows both alike; never both at once, or one fills its buffers while
    # the other is measured.
    for shuffle in [True, False] * _ROUNDS:
        batch_count, batch_seconds = _measure(batches(shuffle), seconds / _ROUNDS)
        count[shuffle] += batch_count
        spent[shuffle] += batch_seconds
    for shuffle in count:
        verify(count[shuffle] + _WARM_UP_BATCHES, shuffle)
    rate = {shuffle: count[shuffle] * phase.batch_size * phase.seq_len / spent[shuffle] for shuffle in count}
    return {
        "real_tokens_per_second": fill * rate[True],
        "positions_per_second": rate[True],
        "sequential_positions_per_second": rate[False],
        "random_access_cost": 1 - rate[True] / rate[False],
        "seconds_to_first_batch": seconds_to_first_batch,
        "batches": count[True],
        "seconds": spent[True],
        "token_fraction": fill,
        "seq_len": phase.seq_len,
        "batch_size": phase.batch_size,
    }


def _measure(stream: Iterator[dict[str, np.ndarray]], seconds: float) -> tuple[int, float]:
    """Batches taken, at least one, and the seconds this took; without the first few, which start the threads."""
    for _ in range(_WARM_UP_BATCHES):
        next(stream)
    begin = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - begin < seconds:
        next(stream)
        count += 1
    return count, time.perf_counter() - begin
