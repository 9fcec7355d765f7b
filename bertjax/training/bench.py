"""Times the train step on synthetic batches; imports no TensorFlow."""

import logging
import math
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bertjax.config.run import RunConfig
from bertjax.model.flops import peak_flops_per_second
from bertjax.tasks.task import Task
from bertjax.training.optimizer import LearningRate, make_optimizer
from bertjax.training.sharding import make_mesh, put_batch, replicated
from bertjax.training.step import (
    ATTENTION_FRACTION,
    TOKEN_FRACTION,
    TrainState,
    compute_metrics,
    init_state,
    make_train_step,
)
from bertjax.training.train import check_batches

logger = logging.getLogger(__name__)


def bench_step(settings: RunConfig, task: Task, steps: int) -> dict[str, Any]:
    """Runs `steps` timed train steps of the first phase's usual shape, after one that compiles.

    Args:
      settings: of the run that is timed.
      task: built from them.
      steps: timed steps; the figure is their median.

    Returns:
      tokens_per_second and mfu, of tokens alone; positions_per_second, with padding; fill, the share of positions that
      are tokens; seconds_to_first_step (tracing, compiling and one step), seconds_per_step, its fastest and slowest,
      peak_memory_bytes of one device (of the process on CPU), the peak and where it comes from, and `losses`, with the
      other values of the steps; None of those that are not finite.
    """
    started = time.perf_counter()
    train_step, state, given = step_of(settings, task)
    state = jax.block_until_ready(train_step(state, *given))
    first = time.perf_counter() - started
    logger.info(f"first step after {first:.1f} s")
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        state = train_step(state, *given)
        jax.block_until_ready(state.step)
        seconds.append(time.perf_counter() - start)
        logger.info(f"step of {seconds[-1]:.3f} s")
    # After the steps, not before: processors that have just worked are as warm as they were during them.
    peak, source = peak_flops_per_second(jax.devices())
    usual, sums = task.usual_step(), compute_metrics(jax.device_get(state.sums))
    work = task.work(usual + 1).since(task.work(usual))
    fill, attention_fraction = sums.pop(TOKEN_FRACTION), sums.pop(ATTENTION_FRACTION)
    if not all(map(math.isfinite, sums.values())):
        logger.info(f"not finite: {', '.join(name for name, value in sums.items() if not math.isfinite(value))}")
    real_flops = work.real_flops(fill, attention_fraction)
    return {
        "tokens_per_second": fill * work.positions / statistics.median(seconds),
        "positions_per_second": work.positions / statistics.median(seconds),
        "token_fraction": fill,
        "mfu": real_flops / statistics.median(seconds) / peak if peak else None,
        "seconds_to_first_step": first,
        "seconds_per_step": statistics.median(seconds),
        "seconds_per_step_min": min(seconds),
        "seconds_per_step_max": max(seconds),
        "peak_memory_bytes": _peak_memory_bytes(),
        "peak_flops_per_second": peak,
        "peak_source": source,
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "batch_size": settings.data.batch_size,
        "rows": work.rows,
        "seq_len": given[0]["input_ids"].shape[-1],
        "dtype": str(jnp.dtype(task.objective.model.config.dtype)),
        "losses": {name: value if math.isfinite(value) else None for name, value in sums.items()},
    }


def step_of(settings: RunConfig, task: Task) -> tuple[Callable[..., TrainState], TrainState, tuple[Any, ...]]:
    """The first phase's train step, a state to begin with, and what else it takes: a synthetic batch, key and rate."""
    mesh = make_mesh(settings.mesh)
    check_batches(task, mesh, settings.grad_accum_steps)
    optimizer = make_optimizer(settings.optimizer)
    state = init_state(task.objective, optimizer, mesh, jax.random.key(settings.seed))
    key = jax.device_put(jax.random.key(settings.seed + 1), replicated(mesh))
    rate = LearningRate(settings.optimizer.learning_rate, task.schedule.warmup_steps, task.schedule.steps)
    given = (put_batch(task.synthetic_batch(0), mesh), key, rate)
    return make_train_step(task.objective, optimizer, mesh, settings.grad_accum_steps), state, given


def _peak_memory_bytes() -> int:
    statistics_of_device = jax.local_devices()[0].memory_stats()
    if statistics_of_device:
        return statistics_of_device["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
