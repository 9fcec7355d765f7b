"""What a run tells: a line with speed and time left, metrics on disk, curves, and the result beside a baseline."""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.data.settings import Phase
from bertjax.planning.flops import flops_per_token, peak_flops_per_second
from bertjax.report.curves import draw_curves
from bertjax.tasks.task import Task
from bertjax.training.optimizer import OptimizerConfig, learning_rate
from bertjax.training.workdir import write_atomically
from bertjax.training.writers import METRICS, TIMING, Writers, duration, read_lines, say

RESULTS = "results.json"
CURVES = "curves.png"


class Progress:
    """Speed, history and files of one run; it is told what happened and decides nothing.

    Attributes:
      first_loss: the first loss this run logged, in whichever attempt; None before.
      evaluation: the last evaluation's metrics, without the prefix they have in the files.
    """

    def __init__(self, config: ConfigDict, task: Task, workdir: epath.Path, step: int) -> None:
        """Goes on after `step`; a run that begins has none behind it, not even an attempt's evaluation at step 0."""
        self._config, self._task, self._workdir = config, task, workdir
        behind = [line for line in read_lines(workdir / METRICS) if step and line["step"] <= step]
        self.first_loss: float | None = next((line["loss"] for line in behind if "loss" in line), None)
        evaluations = [_evaluation(line) for line in behind if "eval_loss" in line]
        self._first_evaluation = evaluations[0] if evaluations else {}
        self.evaluation: dict[str, float] = evaluations[-1] if evaluations else {}
        self._writers = Writers(workdir, step if step else -1) if jax.process_index() == 0 else None
        self._schedule = learning_rate(OptimizerConfig(**config.optimizer), config.steps)
        self._peak, source = peak_flops_per_second(jax.devices())
        say(f"{jax.device_count()} {jax.devices()[0].device_kind} device(s); MFU against {source}")
        self._started = self._since = time.monotonic()
        self._since_step, self._paused_seconds = step, 0.0
        self._compiling = True
        self._tokens_per_second = 0.0

    def close(self) -> None:
        if self._writers:
            self._writers.close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves what is done inside out of the speed."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._paused_seconds += time.monotonic() - start

    def stepped(self, step: int, done: jax.Array) -> None:
        """After each step; waits for the first, which compiles and is left out of the speed."""
        if self._compiling:
            jax.block_until_ready(done)
            seconds = time.monotonic() - self._started - self._paused_seconds
            say(f"first step after {seconds:.1f} s, compilation included")
            self._compiling = False
            self._since, self._since_step, self._paused_seconds = time.monotonic(), step, 0.0

    def log(self, step: int, phase: Phase, values: dict[str, float]) -> None:
        """A line for the terminal and one for each file, of the metrics since the last."""
        if self.first_loss is None:
            self.first_loss = values["loss"]
        self._measure(step, phase)
        flops = flops_per_token(self._task.model.config, phase.seq_len, phase.max_predictions)
        mfu = self._tokens_per_second * flops / self._peak if self._peak else math.nan
        shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items() if "accuracy" in name)
        say(
            f"step {step:,}/{self._config.steps:,}  loss {values['loss']:.3f}  {shown}  "
            f"{self._tokens_per_second:,.0f} tokens/s  MFU {100 * mfu:.1f} %  left {duration(self._seconds_left(step))}"
        )
        rate = float(self._schedule(step - 1))
        self._write(METRICS, step, {**values, "learning_rate": rate, "tokens": self._tokens_seen(step)})
        self._write(TIMING, step, {"tokens_per_second": self._tokens_per_second, "mfu": mfu})

    def evaluated(self, step: int, values: dict[str, float], seconds: float) -> None:
        """An evaluation: a line, the files, and the curves drawn anew."""
        self.evaluation = values
        self._first_evaluation = self._first_evaluation or values
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        say(f"step {step:,} held out: {shown}  ({seconds:.1f} s)")
        prefixed = {f"eval_{name}": value for name, value in values.items()}
        self._write(METRICS, step, {**prefixed, "tokens": self._tokens_seen(step)})
        if self._writers:
            draw_curves(read_lines(self._workdir / METRICS), self._workdir / CURVES)

    def finished(self, step: int) -> None:
        """Writes `results.json` and prints the first and the last evaluation beside the baseline."""
        if not self._writers:
            return
        baseline = self._task.baseline()
        results = {"step": step, "seed": self._config.seed, **self.evaluation, "baseline": baseline}
        write_atomically(self._workdir / RESULTS, json.dumps(results, indent=1) + "\n")
        say(f"{'held out':<18}{'before':>10}{'after':>10}{'no context':>12}")
        for name in self._task.metrics:
            if name in self.evaluation:
                before = self._first_evaluation.get(name, math.nan)
                guess = f"{baseline[name]:.4f}" if name in baseline else ""
                say(f"{name:<18}{before:>10.4f}{self.evaluation[name]:>10.4f}{guess:>12}")
        say(f"done: {step:,} steps; curves in {self._workdir / CURVES}, numbers in {self._workdir / METRICS}")

    def _write(self, file: str, step: int, values: dict[str, Any]) -> None:
        if self._writers:
            self._writers.write(file, step, values)

    def _measure(self, step: int, phase: Phase) -> None:
        if step > self._since_step:
            seconds = time.monotonic() - self._since - self._paused_seconds
            tokens = (step - self._since_step) * phase.batch_size * phase.seq_len
            self._tokens_per_second = tokens / max(seconds, 1e-9)
        self._since, self._since_step, self._paused_seconds = time.monotonic(), step, 0.0

    def _tokens_seen(self, step: int) -> int:
        """Tokens of all rows up to a step, padding included."""
        return sum(
            max(0, min(step, phase.stop_step) - phase.start_step) * phase.batch_size * phase.seq_len
            for phase in self._task.phases
        )

    def _seconds_left(self, step: int) -> float:
        """At the speed of now, counted in tokens, since a step of a later phase may be a larger one."""
        tokens = self._tokens_seen(self._config.steps) - self._tokens_seen(step)
        return tokens / self._tokens_per_second if self._tokens_per_second else 0.0


def _evaluation(line: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}
