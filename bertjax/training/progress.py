"""Progress of a run: speed and time left on the terminal, metrics and curves in the workdir."""

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from etils import epath

from bertjax.model.flops import peak_flops_per_second
from bertjax.model.partitioning import resolve_auto
from bertjax.tasks.objectives.step_cost import ATTENTION_FRACTION, TOKEN_FRACTION, StepCost
from bertjax.tasks.task import MetricSums, Task
from bertjax.training.cost import cost_before
from bertjax.training.metrics import (
    EVAL_PREFIX,
    METRICS,
    TIMING,
    JsonlWriter,
    TensorBoardWriter,
    TrackerWriter,
    group_metrics,
    read_lines,
)
from bertjax.training.optimizer import make_schedule
from bertjax.training.plots import plot_curves
from bertjax.training.step import TrainState, metric_means
from bertjax.training.workdir import CURVES
from bertjax.utils.terminal import duration, progress_bar

logger = logging.getLogger(__name__)

# Minimum seconds between updates of `curves.png`. Plotting takes as long as evaluating a small model.
_SECONDS_BETWEEN_DRAWINGS = 30


class Progress:
    """Reporter of a run: logs steps and evaluations, and writes metrics and curves. Only host 0 writes files.

    Attributes:
      first_loss: first logged loss of the run, even after a resume (infinity: no loss yet).
    """

    def __init__(
        self, task: Task, workdir: epath.Path, step: int, lines: Sequence[dict[str, Any]], trackers: Sequence[str] = ()
    ) -> None:
        """Opens the files of a run.

        `step` is the number of finished steps (0: a new run). `lines` are the records of `metrics.jsonl` up to `step`.
        """
        self._task, self._workdir = task, workdir
        self._schedule = make_schedule(task.config.optimizer, task.warmup_steps, task.phase_schedule)
        self.first_loss = next((line["loss"] for line in lines if "loss" in line), math.inf)
        self._files: dict[str, JsonlWriter] = {}
        self._boards: list[TensorBoardWriter | TrackerWriter] = []
        if jax.process_index() == 0:
            resumed_after = step or -1
            self._files = {name: JsonlWriter(workdir / name, resumed_after) for name in (METRICS, TIMING)}
            config = dataclasses.asdict(task.config)
            self._boards = [TensorBoardWriter(workdir, resumed_after)]
            self._boards += [TrackerWriter(name, workdir, config) for name in trackers]
        self._peak_flops_per_second, source = peak_flops_per_second(jax.devices())
        num_steps = task.total_steps - task.config.optimizer.head_steps
        if task.warmup_steps >= num_steps:
            steps = f"warm-up takes {task.warmup_steps:,} of {num_steps:,} steps"
            logger.info(f"{steps}, so the learning rate does not reach {task.config.optimizer.learning_rate:g}")
        logger.info(f"{jax.device_count()} {jax.devices()[0].device_kind} device(s); MFU relative to {source}")
        logger.info(f"compiling the train step for {resolve_auto(task.objective.model.config).dtype}")
        self._compile_seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._record_compilation)
        # Show the bar only on a terminal, because elsewhere, the log lines show the progress.
        self._bar = progress_bar("training", task.total_steps, " steps", shown=sys.stderr.isatty(), done=step)
        self._first_step = step + 1
        self._started = self._drawn_at = time.monotonic()
        self._reset_clock(step)
        self._speed: dict[str, float] = {}
        self._seconds_per_flop = 0.0
        # Continue the token count from the last line that contains it.
        counted = [line for line in lines if TOKEN_FRACTION in line]
        self._counted_at, self._tokens = (counted[-1]["step"], counted[-1]["tokens"]) if counted else (0, 0)

    def flush(self) -> str:
        """Writes all lines to storage, so that no line is missing if the run resumes from the next checkpoint.

        Returns the hash of the lines of `metrics.jsonl` ("" on hosts other than 0).
        """
        for writer in (*self._files.values(), *self._boards):
            writer.flush()
        return self._files[METRICS].sha256 if self._files else ""

    def close(self) -> None:
        self._bar.close()
        jax.monitoring.unregister_event_duration_listener(self._record_compilation)
        for writer in (*self._files.values(), *self._boards):
            writer.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the duration of the `with` block from the measured speed."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._paused_seconds += time.monotonic() - start

    def step_done(self, step: int, state: TrainState) -> None:
        """Advances the progress bar. After the first step and compilations, waits for the step and resets the clock."""
        self._bar.update()
        if step == self._first_step or self._compile_seconds > self._compile_seconds_at_start:
            jax.block_until_ready(state.step)
            seconds = time.monotonic() - self._since - self._paused_seconds
            if step == self._first_step:
                logger.info(f"first step after {seconds:.1f} s, including data loading and compilation")
            self._reset_clock(step)

    def log_step(self, step: int, values: dict[str, float]) -> None:
        """Logs the training metrics `values`, which are means over the steps since the last call."""
        values = dict(values)
        token_fraction, attention_fraction = values[TOKEN_FRACTION], values.pop(ATTENTION_FRACTION)
        if self.first_loss == math.inf:
            self.first_loss = values.get("loss", math.inf)
        self._measure_speed(step, token_fraction, attention_fraction)
        scores = [metric.name for metric in self._task.objective.metrics if not metric.is_loss]
        accuracies = "  ".join(f"{name} {values[name]:.3f}" for name in scores if name in values)
        speed = ""
        if self._speed:
            # Estimate the remaining time from FLOPs instead of steps, because later steps may need more FLOPs.
            seconds_left = self._cost(step, self._task.total_steps).flops * self._seconds_per_flop
            speed = (
                f"  {self._speed['tokens_per_second']:,.0f} tokens/s  {100 * token_fraction:.0f} % tokens  "
                f"MFU {100 * self._speed['mfu']:.1f} %  {duration(seconds_left)} left"
            )
        loss = values.get("loss", math.nan)
        logger.info(f"step {step:,}/{self._task.total_steps:,}: loss {loss:.3f}  {accuracies}{speed}")
        counts = self._token_counts(step, token_fraction)
        self._tokens, self._counted_at = counts["tokens"], step
        learning_rate: Any = self._schedule(step - 1)
        self._write(METRICS, step, {**values, "learning_rate": float(learning_rate), **counts})
        if self._speed:
            self._write(TIMING, step, self._speed)

    def log_evaluation(self, step: int, values: dict[str, float], seconds: float, train_sums: MetricSums) -> None:
        """Logs an evaluation that took `seconds`, and redraws the curves at most every 30 seconds.

        `train_sums` are the training metric sums since the last logged step. They determine the number of tokens seen.
        """
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        logger.info(f"eval step {step:,}: {metrics}  ({seconds:.1f} s)")
        # Directly after a logged step, the sums are 0, so `metric_means` omits TOKEN_FRACTION.
        counts = self._token_counts(step, metric_means(train_sums).get(TOKEN_FRACTION, 0.0))
        self._write(METRICS, step, {**{f"{EVAL_PREFIX}{name}": value for name, value in values.items()}, **counts})
        self.flush()
        if self._files and time.monotonic() - self._drawn_at >= _SECONDS_BETWEEN_DRAWINGS:
            self.plot_curves()
            self._drawn_at = time.monotonic()

    def plot_curves(self) -> None:
        """Draws `curves.png` if `metrics.jsonl` contains at least two lines."""
        lines = read_lines(self._workdir / METRICS)
        if self._files and len(lines) > 1:
            # Curves of pre-training do not show the baseline, which may take minutes to compute.
            baseline = self.baseline if self._task.steps_per_epoch else {}
            plot_curves(self._task, lines, self._workdir / CURVES, baseline)

    def finish(self, step: int, best: epath.Path) -> None:
        """Logs the duration of a finished run."""
        metric = self._task.best_metric
        if step < self._task.total_steps and metric:
            patience, total = self._task.config.patience, self._task.total_steps
            cause = f"{metric.name} has not improved in {patience:,} evaluation{'s' * (patience > 1)}"
            logger.info(f"stopped early at step {step:,} of {total:,}: {cause}")
        seconds = time.monotonic() - self._started
        compilation = f"{100 * self._compile_seconds / seconds:.0f} % of it compilation"
        which = "best" if metric else "last"
        logger.info(f"done: {step:,} steps in {duration(seconds)}, {compilation}; {which} checkpoint {best}")
        curves = f"curves in {self._workdir / CURVES}, " if (self._workdir / CURVES).exists() else ""
        logger.info(f"{curves}metrics in {self._workdir / METRICS}")

    @functools.cached_property
    def baseline(self) -> dict[str, float]:
        """Metrics of the task's baseline, which may take minutes to compute."""
        return self._task.baseline() if self._task.eval_every else {}

    def _record_compilation(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self._compile_seconds += duration_secs

    def _write(self, file: str, step: int, values: dict[str, Any]) -> None:
        """Writes values to a file, to TensorBoard and to the trackers, on host 0 only."""
        if self._files:
            self._files[file].write(step, values)
        for board in self._boards:
            board.write(step, group_metrics(values))

    def _token_counts(self, step: int, token_fraction: float) -> dict[str, int]:
        """Returns the tokens and positions up to `step`. `token_fraction` is the mean since the last logged step."""
        tokens = self._tokens + round(token_fraction * self._cost(self._counted_at, step).positions)
        return {"tokens": tokens, "positions": self._task.unfrozen_cost_before(step).positions}

    def _cost(self, start: int, stop: int) -> StepCost:
        return cost_before(self._task, stop) - cost_before(self._task, start)

    def _reset_clock(self, step: int) -> None:
        """Starts a new speed measurement. Called after compilations, too, so that speeds do not include them."""
        self._since, self._since_step, self._paused_seconds = time.monotonic(), step, 0.0
        self._compile_seconds_at_start = self._compile_seconds

    def _measure_speed(self, step: int, token_fraction: float, attention_fraction: float) -> None:
        """Sets `_speed` to the speed since the last reset of the clock ({}: no steps since then). Resets the clock."""
        self._speed = {}
        if step > self._since_step:
            seconds = max(time.monotonic() - self._since - self._paused_seconds, 1e-9)
            cost, peak = self._cost(self._since_step, step), self._peak_flops_per_second
            self._seconds_per_flop = seconds / cost.flops if cost.flops else 0.0
            self._speed = {
                "tokens_per_second": token_fraction * cost.positions / seconds,
                "positions_per_second": cost.positions / seconds,
                "rows_per_second": cost.rows / seconds,
                "mfu": cost.token_flops(token_fraction, attention_fraction) / seconds / peak if peak else math.nan,
            }
        self._reset_clock(step)
