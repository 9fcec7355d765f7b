"""Benchmarks of the train step on one fixed batch, and of the pre-training input pipeline."""

import dataclasses
import itertools
import logging
import math
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np
from etils import epath

from bertjax.data.finetuning.batches import make_batch
from bertjax.data.schema import is_token, synthetic_batch
from bertjax.data.shard import SINGLE_SHARD
from bertjax.model.flops import peak_flops_per_second
from bertjax.model.partitioning import resolve_auto
from bertjax.tasks.embedding.task import EmbedTask
from bertjax.tasks.finetuning.task import FinetuningTask
from bertjax.tasks.objectives.step_cost import ATTENTION_FRACTION, TOKEN_FRACTION
from bertjax.tasks.pretraining.task import PretrainingTask
from bertjax.tasks.task import NumpyBatch, Task
from bertjax.training.cost import cost_of_step
from bertjax.training.optimizer import make_optimizer, make_schedule
from bertjax.training.profiling import StepProfiler
from bertjax.training.sharding import check_batch_sizes, make_mesh, put_batch, replicated
from bertjax.training.step import make_init_state, make_train_step, metric_means

logger = logging.getLogger(__name__)

_WARM_UP_BATCHES = 10


def benchmark_batch(task: Task) -> tuple[NumpyBatch, int]:
    """Returns a batch to time, and the index of a train step whose batch has the same shape.

    Fine-tuning uses a batch of the most common shape, and embedding training uses the first batch. Other tasks, and
    tasks without data, use a random batch.
    """
    if isinstance(task, FinetuningTask) and task.train_examples is not None:
        step = task.order.typical_step()
        return make_batch(task.train_examples, *task.order.batch(step), SINGLE_SHARD), step
    if isinstance(task, EmbedTask) and task.files:
        return next(task.train_batches(0, SINGLE_SHARD)), 0
    return synthetic_batch(task.objective.schema, task.synthetic_sizes()), 0


def bench_step(task: Task, steps: int, profile_steps: range = range(0)) -> dict[str, Any]:
    """Times `steps` train steps on `benchmark_batch`, after a first step that includes compilation.

    Writes a profile of the 0-based timed steps in `profile_steps` to a temporary folder (default: no profile).

    In the result, `tokens_per_second` and `mfu` (None: unknown device) exclude padding, and `positions_per_second`
    includes it. `seconds_per_step` is the median. `peak_memory_bytes` is the peak of one device or, on CPU, of the
    process. `losses` contains the mean of each metric over all steps, or None if it is not finite.
    """
    started = time.perf_counter()
    config, mesh = task.config, make_mesh(task.config.mesh)
    check_batch_sizes(task.batch_sizes, mesh, config.grad_accum_steps)
    optimizer = make_optimizer(config.optimizer, task.objective.untrained_modules)
    train_step = make_train_step(task.objective, optimizer, mesh, config.grad_accum_steps)
    state = make_init_state(task.objective, optimizer, mesh)(jax.random.key(config.seed))
    key = jax.device_put(jax.random.key(config.seed + 1), replicated(mesh))
    schedule = make_schedule(config.optimizer, task.warmup_steps, task.phase_schedule)
    batch, batch_step = benchmark_batch(task)
    inputs = put_batch(batch, mesh), key, schedule
    state = jax.block_until_ready(train_step(state, *inputs))
    first = time.perf_counter() - started
    logger.info(f"first step after {first:.1f} s, including compilation")
    seconds = []
    log_dir = epath.Path(tempfile.mkdtemp(prefix="bertjax-profile-")) if profile_steps else epath.Path()
    with StepProfiler(log_dir, profile_steps) as profiler:
        for step in range(steps):
            start = time.perf_counter()
            with profiler.step(step):
                state = train_step(state, *inputs)
                jax.block_until_ready(state.step)
            seconds.append(time.perf_counter() - start)
            profiler.step_done(step + 1, state)
            logger.info(f"step {step + 1}: {seconds[-1]:.3f} s")
    # Measure peak FLOP/s directly after the steps, because a CPU's speed depends on its temperature.
    peak, source = peak_flops_per_second(jax.devices())
    metrics = metric_means(state.sums)
    cost = cost_of_step(task, batch_step)
    token_fraction, attention_fraction = metrics.pop(TOKEN_FRACTION), metrics.pop(ATTENTION_FRACTION)
    if not_finite := [name for name, value in metrics.items() if not math.isfinite(value)]:
        logger.info(f"metrics that are not finite: {', '.join(not_finite)}")
    median = statistics.median(seconds)
    return {
        "tokens_per_second": token_fraction * cost.positions / median,
        "positions_per_second": cost.positions / median,
        "token_fraction": token_fraction,
        "mfu": cost.token_flops(token_fraction, attention_fraction) / median / peak if peak else None,
        "seconds_to_first_step": first,
        "seconds_per_step": median,
        "seconds_per_step_min": min(seconds),
        "seconds_per_step_max": max(seconds),
        "peak_memory_bytes": _peak_memory_bytes(),
        "peak_flops_per_second": peak,
        "peak_source": source,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "batch_size": config.data.batch_size,
        "rows": cost.rows,
        "seq_len": inputs[0]["input_ids"].shape[-1],
        "dtype": resolve_auto(task.objective.model.config).dtype,
        "losses": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
    }


def step_table(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the result of `bench_step` as rows (name, value, unit) of a table."""
    losses = [(name, "not finite" if value is None else f"{value:.4f}", "") for name, value in result["losses"].items()]
    peak = result["peak_flops_per_second"]
    return [
        ("device", f"{result['devices']} x {result['device']}", ""),
        ("batch", f"{result['rows']:,} x {result['seq_len']:,}", "rows x tokens"),
        ("dtype", result["dtype"], ""),
        *losses,
        ("peak memory", f"{result['peak_memory_bytes'] / 2**30:.2f}", "GiB per device"),
        ("peak speed", f"{peak / 1e12:.3g}" if peak else "unknown", f"TFLOP/s ({result['peak_source']})"),
        ("first step", f"{result['seconds_to_first_step']:.1f}", "s, with compilation"),
        ("fastest step", f"{result['seconds_per_step_min']:.4f}", "s"),
        ("slowest step", f"{result['seconds_per_step_max']:.4f}", "s"),
        ("median step", f"{result['seconds_per_step']:.4f}", "s"),
        ("MFU", f"{100 * result['mfu']:.1f}" if result["mfu"] is not None else "unknown", "% without padding"),
        ("tokens", f"{100 * result['token_fraction']:.1f}", "% of positions, the rest is padding"),
        ("positions", f"{result['positions_per_second']:,.0f}", "positions/s"),
        ("speed", f"{result['tokens_per_second']:,.0f}", "tokens/s"),
    ]


def _peak_memory_bytes() -> int:
    memory_stats = jax.local_devices()[0].memory_stats()
    if memory_stats:
        return memory_stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024  # `ru_maxrss` is in bytes on macOS, and in KiB on Linux.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def bench_input(task: PretrainingTask, seconds: float) -> dict[str, Any]:
    """Measures the input pipeline's throughput on batches of the first training phase, for about `seconds` seconds.

    In the result, `real_tokens_per_second` excludes padding and `positions_per_second` includes it.
    `seconds_to_first_batch` includes opening or building the pair index.
    """
    # The benchmark stops at a time limit, long before this number of steps.
    phase = dataclasses.replace(task.phases[0], stop_step=1 << 40)
    started = time.perf_counter()
    stream = task.phase_batches(phase, phase.start_step, SINGLE_SHARD)  # This opens or builds the pair index.
    seconds_to_open = time.perf_counter() - started
    task.check_data_files(wait=True)  # Otherwise, hashing would compete with the measurement for the CPU.
    started = time.perf_counter()
    first_batches = [next(stream)]
    seconds_to_first_batch = seconds_to_open + time.perf_counter() - started
    # Do not measure the first batches, which include the start of the pipeline's threads.
    first_batches += itertools.islice(stream, _WARM_UP_BATCHES)
    begin = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - begin < seconds:
        next(stream)
        count += 1
    elapsed = time.perf_counter() - begin
    rate = count * phase.batch_size * phase.seq_len / elapsed
    token_fraction = float(np.mean([is_token(batch).mean() for batch in first_batches]))
    return {
        "real_tokens_per_second": token_fraction * rate,
        "positions_per_second": rate,
        "seconds_to_first_batch": seconds_to_first_batch,
        "batches": count,
        "seconds": elapsed,
        "token_fraction": token_fraction,
        "seq_len": phase.seq_len,
        "batch_size": phase.batch_size,
    }


def input_table(result: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the result of `bench_input` as rows (name, value, unit) of a table."""
    return [
        ("batch", f"{result['batch_size']:,} x {result['seq_len']:,}", "rows x tokens"),
        ("first batch", f"{result['seconds_to_first_batch']:.1f}", "s"),
        ("measured", f"{result['batches']:,}", f"batches in {result['seconds']:.1f} s"),
        ("tokens", f"{100 * result['token_fraction']:.1f}", "% of positions, the rest is padding"),
        ("positions", f"{result['positions_per_second']:,.0f}", "positions/s"),
        ("speed", f"{result['real_tokens_per_second']:,.0f}", "tokens/s"),
    ]
