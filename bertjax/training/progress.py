"""What a run tells: a line with speed and time left, metrics on disk, curves, and the result beside a baseline."""

import contextlib
import dataclasses
import json
import logging
import math
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError, first_line
from bertjax.metrics.report import ClassReport
from bertjax.model.flops import peak_flops_per_second
from bertjax.tasks.finetuning.selection import is_out_of_patience, score
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import CHECKPOINTS, saved_fingerprint, saved_metric_lines
from bertjax.training.checkpoint_metadata import sealed, unsealed
from bertjax.training.confusion import draw_confusion
from bertjax.training.curves import HELD_OUT, draw_curves
from bertjax.training.metrics import METRICS, TIMING, Writers, read_lines, rounded
from bertjax.training.optimizer import LearningRate
from bertjax.training.step import ATTENTION_FRACTION, TOKEN_FRACTION
from bertjax.training.workdir import CONFUSION, CURVES, RESULTS, started_from
from bertjax.utils.io import read_json, write_atomic
from bertjax.utils.terminal import duration, progress_bar

logger = logging.getLogger(__name__)

# Drawing takes as long as the evaluation of a small model.
_SECONDS_BETWEEN_DRAWINGS = 30


def read_results(workdir: epath.Path) -> dict[str, Any]:
    """What a finished run came to, as it was written.

    Raises:
      BertjaxError: it has been changed since.
    """
    file = workdir / RESULTS
    try:
        return unsealed(read_json(file))
    except (OSError, ValueError, BertjaxError) as error:
        raise BertjaxError(
            f"{file} is damaged ({first_line(error)}); remove it, and the command that trained writes it again"
        ) from error


class Progress:
    """Speed, history and files of one run; it is told what happened and decides nothing.

    Attributes:
      first_loss: the first loss this run logged, in whichever attempt; None before.
      evaluation: the last evaluation's metrics, without the prefix they have in the files.
    """

    def __init__(self, settings: RunConfig, task: Task, workdir: epath.Path, step: int) -> None:
        """Goes on after `step`; a run that begins has none behind it, not even an attempt's evaluation at step 0."""
        self._settings, self._task, self._workdir = settings, task, workdir
        behind = [line for line in read_lines(workdir / METRICS) if step and line["step"] <= step]
        self.first_loss: float | None = next((line["loss"] for line in behind if "loss" in line), None)
        evaluations = [(line["step"], _evaluation(line)) for line in behind if _evaluation(line)]
        self._first_evaluation = evaluations[0][1] if evaluations else {}
        self._evaluated_at, self.evaluation = evaluations[-1] if evaluations else (-1, {})
        self._scores = [self._score(values) for _, values in evaluations]
        self._writers = Writers(workdir, step if step else -1) if jax.process_index() == 0 else None
        written = saved_metric_lines(workdir / CHECKPOINTS / str(step)) if step else None
        if written is not None and self.metric_lines < written:
            logger.info(
                f"{workdir / METRICS} has {self.metric_lines:,} of the {written:,} lines that were written up to step "
                f"{step:,}; {written - self.metric_lines:,} are torn or missing, here and in the curves"
            )
        schedule = task.schedule
        self._rate = LearningRate(settings.optimizer.learning_rate, schedule.warmup_steps, schedule.steps)
        self._peak, source = peak_flops_per_second(jax.devices())
        logger.info(f"{jax.device_count()} {jax.devices()[0].device_kind} device(s); MFU against {source}")
        if schedule.warmup_steps >= schedule.steps:
            logger.info(
                f"warm-up takes {schedule.warmup_steps:,} steps and the run has {schedule.steps:,}: the learning rate "
                f"does not come to {settings.optimizer.learning_rate:g}; config.optimizer.warmup_steps sets it"
            )
        self._compilation = _Compilation()
        # Elsewhere than on a terminal the lines of `log` say as much.
        shown = self._writers is not None and sys.stderr.isatty()
        self._bar = progress_bar("training", schedule.steps, " steps", shown=shown, done=step)
        self._started = self._since = self._drawn = time.monotonic()
        self._since_step, self._paused_seconds = step, 0.0
        self._compiling = True
        self._speed: dict[str, float] = {}
        self._flops_per_second = 0.0
        counted = [line for line in behind if "token_fraction" in line]
        self._counted_at, self._tokens = (counted[-1]["step"], counted[-1]["tokens"]) if counted else (0, 0)

    @property
    def metric_lines(self) -> int:
        """Lines in `metrics.jsonl`; 0 in other processes than the first, which writes them."""
        return self._writers.metric_lines if self._writers else 0

    def flush(self) -> None:
        """Writes out all lines so far; called before a checkpoint, from which a run goes on with all of them."""
        if self._writers:
            self._writers.flush()

    def close(self) -> None:
        self._bar.close()
        self._compilation.close()
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
        self._bar.update()
        if self._compiling:
            jax.block_until_ready(done)
            seconds = time.monotonic() - self._started - self._paused_seconds
            logger.info(f"first step after {seconds:.1f} s, reading and compilation included")
            self._compiling = False
            self._since, self._since_step, self._paused_seconds = time.monotonic(), step, 0.0

    def log(self, step: int, values: dict[str, float]) -> None:
        """A line for the terminal and one for each file, of the metrics since the last.

        Tokens are those that are not padding; `positions` counts both.
        """
        if self.first_loss is None:
            self.first_loss = values.get("loss")
        attention_fraction = values.pop(ATTENTION_FRACTION)
        self._measure(step, values[TOKEN_FRACTION], attention_fraction)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items() if "accuracy" in name)
        speed = ""
        if self._speed:
            speed = (
                f"  {self._speed['tokens_per_second']:,.0f} tokens/s  fill {100 * values[TOKEN_FRACTION]:.0f} %  "
                f"MFU {100 * self._speed['mfu']:.1f} %  left {duration(self._seconds_left(step))}"
            )
        logger.info(
            f"step {step:,}/{self._task.schedule.steps:,}  loss {values.get('loss', math.nan):.3f}  {shown}{speed}"
        )
        self._tokens, self._counted_at = self._tokens_at(step, values[TOKEN_FRACTION]), step
        rate = float(self._rate.at(step - 1))
        self._write(METRICS, step, {**values, "learning_rate": rate, **self._seen(step, values[TOKEN_FRACTION])})
        self._write(TIMING, step, self._speed)

    def evaluated(self, step: int, values: dict[str, float], seconds: float, fill: float) -> None:
        """An evaluation: a line, the files, and the curves drawn anew where they are old.

        Args:
          fill: of the batches since the last logged step.
        """
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        logger.info(f"step {step:,} held out: {shown}  ({seconds:.1f} s)")
        values = {name: rounded(value) for name, value in values.items()}
        self.evaluation, self._evaluated_at = values, step
        self._scores.append(self._score(values))
        self._first_evaluation = self._first_evaluation or values
        prefixed = {f"{HELD_OUT}{name}": value for name, value in values.items()}
        self._write(METRICS, step, {**prefixed, **self._seen(step, fill)})
        self.flush()
        if self._writers and time.monotonic() - self._drawn >= _SECONDS_BETWEEN_DRAWINGS:
            lines = read_lines(self._workdir / METRICS)
            # The first alone is a point, and no curve.
            if len(lines) > 1:
                draw_curves(lines, self._workdir / CURVES, self._task.best_by)
                self._drawn = time.monotonic()

    def evaluation_at(self, step: int) -> dict[str, float]:
        """What was measured after a step; {} where nothing was."""
        return self.evaluation if step == self._evaluated_at else {}

    def score_at(self, step: int) -> float | None:
        """By which the best checkpoint is told; None where the task has no such metric, or none of this step."""
        return self._score(self.evaluation) if step == self._evaluated_at else None

    def is_best_at(self, step: int) -> bool:
        """Whether what was measured after a step is better than all before it, in whichever attempt."""
        if self.score_at(step) is None:
            return False
        *before, score = self._scores
        return all(other is None or other < score for other in before)

    def is_out_of_patience(self) -> bool:
        """Whether the evaluations so far, in whichever attempt, end a run that waits for a better one no longer."""
        return is_out_of_patience(self._scores, self._task.schedule.patience)

    def _score(self, evaluation: dict[str, float]) -> float | None:
        return score(self._task.best_by, evaluation.get(self._task.best_by))

    def finished(self, last_step: int, checkpoint: epath.Path, classes: dict[str, ClassReport]) -> dict[str, float]:
        """Writes `results.json`, prints the result beside the first evaluation and the baseline, and returns it.

        Args:
          last_step: that was trained.
          checkpoint: the best, else the last; the result is what was measured there.
          classes: what became of each class there, by the suffix of the evaluation set.
        """
        step = int(checkpoint.name)
        lines = read_lines(self._workdir / METRICS)
        measured = [_evaluation(line) for line in lines if line["step"] == step and _evaluation(line)]
        if not measured and self.evaluation:
            logger.info(
                f"{self._workdir / METRICS} has lost the evaluation of step {step:,}; the result is of the last one"
            )
        values = measured[-1] if measured else self.evaluation
        if not self._writers:
            return values
        baseline = self._task.baseline() if self._task.schedule.eval_every else {}
        results = {
            "step": step,
            "seed": self._settings.seed,
            "selected_by": self._task.best_by,
            **values,
            "baseline": baseline,
            "last_step": last_step,
            "checkpoint": f"{CHECKPOINTS}/{checkpoint.name}",
            "parameters_fingerprint": saved_fingerprint(checkpoint),
            "started_from": started_from(self._workdir),
            "data_sha256": self._task.data_hash,
            **{
                f"{name}{suffix}": part for suffix, report in classes.items() for name, part in report.as_json().items()
            },
            **self._task.report,
            "config": dataclasses.asdict(self._settings),
        }
        write_atomic(self._workdir / RESULTS, json.dumps(sealed(results), indent=1) + "\n")
        before = self._first_evaluation if self._task.schedule.eval_first else {}
        width = 2 + max(map(len, [*values, "held out"]))
        if values:
            logger.info(f"{'held out':<{width}}{'before' if before else '':>12}{'after':>12}{'baseline':>12}")
        for name, value in values.items():
            if name != "loss":
                first = f"{before[name]:.4f}" if name in before else ""
                guess = f"{baseline[name]:.4f}" if name in baseline else ""
                logger.info(f"{name:<{width}}{first:>12}{value:>12.4f}{guess:>12}")
        seconds = time.monotonic() - self._started
        compiling = f"{duration(seconds)}, {100 * self._compilation.seconds / seconds:.0f} % of it compiling"
        for suffix, report in classes.items():
            logger.info(f"by class{suffix.replace('_', ' ')}:\n{report.text()}")
        drawn = {suffix: report for suffix, report in classes.items() if report.confusion is not None}
        if drawn:
            draw_confusion(drawn, self._workdir / CONFUSION)
        draw_curves(lines, self._workdir / CURVES, self._task.best_by)
        if last_step < self._task.schedule.steps:
            how_many = f"{self._task.schedule.patience:,} evaluation{'s' * (self._task.schedule.patience > 1)}"
            logger.info(
                f"no better {self._task.best_by} in {how_many}: ended before step {self._task.schedule.steps:,}"
            )
        logger.info(f"done: {last_step:,} steps in {compiling}; result of {checkpoint}")
        logger.info(f"curves in {self._workdir / CURVES}, numbers in {self._workdir / METRICS}")
        return values

    def _write(self, file: str, step: int, values: dict[str, Any]) -> None:
        if self._writers:
            self._writers.write(file, step, values)

    def _seen(self, step: int, fill: float) -> dict[str, int]:
        return {"tokens": self._tokens_at(step, fill), "positions": self._task.work(step).positions}

    def _tokens_at(self, step: int, fill: float) -> int:
        """Tokens of all steps, given the fill of those since the last logged one."""
        return self._tokens + round(fill * self._task.work(step).since(self._task.work(self._counted_at)).positions)

    def _measure(self, step: int, fill: float, attention_fraction: float) -> None:
        if step > self._since_step:
            seconds = max(time.monotonic() - self._since - self._paused_seconds, 1e-9)
            work = self._task.work(step).since(self._task.work(self._since_step))
            self._flops_per_second = work.flops / seconds
            real_flops_per_second = work.real_flops(fill, attention_fraction) / seconds
            self._speed = {
                "tokens_per_second": fill * work.positions / seconds,
                "positions_per_second": work.positions / seconds,
                "rows_per_second": work.rows / seconds,
                "mfu": real_flops_per_second / self._peak if self._peak else math.nan,
            }
        self._since, self._since_step, self._paused_seconds = time.monotonic(), step, 0.0

    def _seconds_left(self, step: int) -> float:
        """At the speed of now, counted in FLOPs, since a later step may be a larger one."""
        flops = self._task.work(self._task.schedule.steps).flops - self._task.work(step).flops
        return flops / self._flops_per_second if self._flops_per_second else 0.0


class _Compilation:
    """Seconds that XLA has compiled for since this was made."""

    def __init__(self) -> None:
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds += seconds

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._heard)


def _evaluation(line: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix(HELD_OUT): value for name, value in line.items() if name.startswith(HELD_OUT)}
