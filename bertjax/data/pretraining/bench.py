"""Benchmark of the pre-training input pipeline."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bertjax.data.corpus.store import Corpus
from bertjax.data.pretraining.batches import numpy_batches, train_dataset
from bertjax.data.pretraining.config import Masking, Phase
from bertjax.data.pretraining.source import RowSource
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
    """Measures the speed of the input pipeline in training order, which is shuffled, and in corpus order.

    Args:
      corpus: open corpus.
      phase: batch shape; the phase's steps are ignored.
      source: source of the rows, such as `SENTENCE_PAIRS`.
      masking: masking settings.
      seed: random seed.
      dupe_factor: number of different passes over the documents.
      seconds: duration of the measurement in each order.
      parallel_calls: batches to produce in parallel (default: None, chosen by tf.data).

    Returns:
      real_tokens_per_second: tokens per second without padding, in training order.
      positions_per_second: tokens per second including padding, in training order.
      sequential_positions_per_second: tokens per second including padding, in corpus order.
      random_access_cost: fraction by which training order is slower than corpus order.
      seconds_to_first_batch: time to the first batch, including opening or building the pair index.
      batches: number of batches measured in training order.
      seconds: duration of the measurement in training order.
      token_fraction: fraction of positions that are not padding, in the first batches.
      seq_len: tokens per row.
      batch_size: rows per batch.
    """
    # The benchmark stops at a time limit, long before this number of steps.
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
            shard=SINGLE_SHARD,
            parallel_calls=parallel_calls,
            shuffle=shuffle,
        )
        return numpy_batches(dataset, corpus)

    if not 0 < seconds <= 3600:
        raise UsageError(f"--seconds={seconds} is out of range; use a value above 0 and at most 3600")
    started = time.perf_counter()
    stream = batches(shuffle=True)
    first_batches = [next(stream)]
    seconds_to_first_batch = time.perf_counter() - started
    first_batches += itertools.islice(stream, _WARM_UP_BATCHES)
    token_fraction = float(np.mean([is_token(batch).mean() for batch in first_batches]))
    del stream
    # Wait for the checksums, because hashing would compete with the measurement for the CPU.
    corpus.checksums.wait()

    count, elapsed = {True: 0, False: 0}, {True: 0.0, False: 0.0}
    # Alternate between the orders, so that other load affects both equally. Measure only one order at a time, since
    # prefetching for one order would slow the other.
    for shuffle in [True, False] * _ROUNDS:
        batch_count, batch_seconds = _measure(batches(shuffle), seconds / _ROUNDS)
        count[shuffle] += batch_count
        elapsed[shuffle] += batch_seconds
    rate = {shuffle: count[shuffle] * phase.batch_size * phase.seq_len / elapsed[shuffle] for shuffle in count}
    return {
        "real_tokens_per_second": token_fraction * rate[True],
        "positions_per_second": rate[True],
        "sequential_positions_per_second": rate[False],
        "random_access_cost": 1 - rate[True] / rate[False],
        "seconds_to_first_batch": seconds_to_first_batch,
        "batches": count[True],
        "seconds": elapsed[True],
        "token_fraction": token_fraction,
        "seq_len": phase.seq_len,
        "batch_size": phase.batch_size,
    }


def input_table(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the (name, value, unit) of each measurement of `bench_input`."""
    return [
        ("batch", f"{result['batch_size']:,} x {result['seq_len']:,}", "rows x tokens"),
        ("first batch", f"{result['seconds_to_first_batch']:.1f}", "s"),
        ("measured", f"{result['batches']:,}", f"batches in {result['seconds']:.1f} s"),
        ("tokens", f"{100 * result['token_fraction']:.1f}", "% of positions, the rest is padding"),
        ("corpus order", f"{result['sequential_positions_per_second']:,.0f}", "positions/s"),
        ("training order", f"{result['positions_per_second']:,.0f}", "positions/s"),
        ("cost of random access", f"{100 * result['random_access_cost']:.1f}", "% of the speed in corpus order"),
        ("speed", f"{result['real_tokens_per_second']:,.0f}", "tokens/s in training order"),
    ]


def _measure(stream: Iterator[dict[str, np.ndarray]], seconds: float) -> tuple[int, float]:
    """Times at least one batch after a warm-up that starts the threads.

    Returns the number of batches and the elapsed seconds.
    """
    for _ in range(_WARM_UP_BATCHES):
        next(stream)
    begin = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - begin < seconds:
        next(stream)
        count += 1
    return count, time.perf_counter() - begin
