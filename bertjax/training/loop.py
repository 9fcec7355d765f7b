"""The one loop every task runs through: start or resume, step, log, evaluate, save."""

import contextlib
import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict

from bertjax.data.settings import Phase
from bertjax.errors import BertjaxError, UsageError
from bertjax.planning.flops import flops_per_token, peak_flops_per_second
from bertjax.report.curves import draw_curves
from bertjax.tasks.task import Task
from bertjax.training import workdir as workdirs
from bertjax.training.checkpoint import Checkpoints, load_params
from bertjax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from bertjax.training.sharding import MeshConfig, batch_shards, make_mesh, put_batch, replicated
from bertjax.training.step import (
    TrainState,
    abstract_state,
    init_state,
    make_eval_step,
    make_train_step,
    means,
    zero_sums,
)
from bertjax.training.writers import METRICS, TIMING, Writers, duration, say

RESULTS = "results.json"


def train(config: ConfigDict, task: Task, path: str, init_from: str | None = None) -> dict[str, float]:
    """Runs a config to its last step, or until SIGTERM or Ctrl-C, and returns the last evaluation's metrics.

    Args:
      config: of the whole run.
      task: built from the same config.
      path: the workdir; a run found there goes on where it stopped.
      init_from: checkpoint whose parameters a new run starts from, with step 0 and a fresh optimizer.

    Raises:
      UsageError: the workdir belongs to another config, or the mesh does not fit the batch.
      BertjaxError: workdir or disk unusable, all checkpoints damaged, or the loss is not finite or diverges.
    """
    mesh = make_mesh(MeshConfig(**config.mesh))
    check_batches(task, mesh, config.accumulate)
    optimizer = make_optimizer(OptimizerConfig(**config.optimizer), config.steps)
    abstract = abstract_state(task, optimizer, mesh)
    workdir = workdirs.prepare(path, config.to_dict(), abstract)
    with workdirs.lock(workdir), _stop_signals() as stop:
        for name, content in task.files.items():
            if jax.process_index() == 0:
                workdirs.write_atomically(workdir / name, content)
        checkpoints = Checkpoints(workdir, config.keep_checkpoints)
        # In this order: a run of this workdir goes on; else `init_from` gives parameters alone; else from scratch.
        state = checkpoints.restore_latest(abstract, say)
        if state is not None:
            say(f"going on from step {int(state.step):,} of {workdir}")
        else:
            state = init_state(task, optimizer, mesh, _key(config.seed, "init"))
            if init_from:
                state = state.replace(params=load_params(init_from, state.params, say))
                say(f"starting at step 0 with the parameters of {init_from}")
        run = _Run(config, task, mesh, optimizer, workdir, checkpoints, stop)
        try:
            return run.to_the_end(state)
        finally:
            checkpoints.close()
            run.close()


def evaluate(task: Task, mesh: Mesh, params: Any) -> dict[str, float]:
    """Metrics over all evaluation batches: each mean, the loss they add up to, and the masked LM's perplexity."""
    return _evaluate(task, mesh, make_eval_step(task, mesh), params)


def _evaluate(task: Task, mesh: Mesh, eval_step: Callable, params: Any) -> dict[str, float]:
    sums = jax.jit(lambda: {name: jnp.zeros(2) for name in task.metrics}, out_shardings=replicated(mesh))()
    for batch in task.eval_batches():
        sums = eval_step(params, put_batch(batch, mesh), sums)
    values = means(jax.device_get(sums))
    values["loss"] = sum(values.get(name, 0.0) for name in task.losses)
    if "mlm_loss" in values:
        values["perplexity"] = math.exp(min(values["mlm_loss"], 700.0))
    return values


def check_batches(task: Task, mesh: Mesh, accumulate: int) -> None:
    """Refuses batches that do not split evenly.

    Raises:
      UsageError: names the phase's batch and the parts.
    """
    parts = batch_shards(mesh) * accumulate
    for phase in task.phases:
        if phase.batch_size % parts:
            raise UsageError(
                f"a batch of {phase.batch_size} rows at length {phase.seq_len} does not split over "
                f"{batch_shards(mesh)} data shards x {accumulate} micro-batches; make it a multiple of {parts}"
            )


def _key(seed: int, purpose: str) -> jax.Array:
    """A random key of its own for each purpose; steps are folded in by whoever uses it."""
    return jax.random.fold_in(jax.random.key(seed), sum(purpose.encode()))


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Turns SIGTERM and Ctrl-C into an entry of the list; a second Ctrl-C interrupts at once."""
    received: list[int] = []

    def handler(number: int, _frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


class _Run:
    """What one call of `train` holds on to between steps; the state itself is passed through."""

    def __init__(
        self,
        config: ConfigDict,
        task: Task,
        mesh: Mesh,
        optimizer: optax.GradientTransformation,
        workdir: epath.Path,
        checkpoints: Checkpoints,
        stop: list[int],
    ) -> None:
        self.config, self.task, self.mesh, self.workdir = config, task, mesh, workdir
        self.checkpoints, self.stop = checkpoints, stop
        self.train_step = make_train_step(task, optimizer, mesh, config.accumulate)
        self.eval_step = make_eval_step(task, mesh)
        self.schedule = learning_rate(OptimizerConfig(**config.optimizer), config.steps)
        self.peak, peak_source = peak_flops_per_second(jax.devices())
        say(f"{jax.device_count()} {jax.devices()[0].device_kind} device(s); MFU against {peak_source}")
        self.writers: Writers | None = None
        self.first_loss: float | None = None
        self.evaluation: dict[str, float] = {}

    def close(self) -> None:
        if self.writers:
            self.writers.close()

    def to_the_end(self, state: TrainState) -> dict[str, float]:
        step = int(state.step)
        if jax.process_index() == 0:
            # Nothing is kept for a run that begins, not even the evaluation at step 0 of an attempt before it.
            self.writers = Writers(self.workdir, step if step else -1)
            history = self.writers.history()
            self.first_loss = next((line["loss"] for line in history if "loss" in line), None)
            self.evaluation = next((_evaluation(line) for line in reversed(history) if "eval_loss" in line), {})
        self.clock = _Clock(step)
        key = jax.jit(lambda: _key(self.config.seed, "dropout"), out_shardings=replicated(self.mesh))()
        if step == 0:
            self.evaluate(state, 0)
        for phase in self.task.phases:
            if step >= phase.stop_step:
                continue
            batches = self.task.train_batches(phase, max(step, phase.start_step))
            for batch in batches:
                rows = put_batch(batch, self.mesh)
                # The batch is all that moves between host and devices.
                with jax.transfer_guard("disallow"):
                    state = self.train_step(state, rows, key)
                step += 1
                if self.clock.first_step_seconds is None:
                    jax.block_until_ready(state.step)
                    self.clock.first_step_done(step)
                state = self.after_step(state, step, phase)
                if self.stopping(step):
                    self.save(state)
                    self.checkpoints.wait()
                    say(f"stopped by a signal at step {step:,}; saved. The same command goes on from here")
                    return self.evaluation
        self.checkpoints.wait()
        if self.writers:
            self.report(step)
        say(f"done: {step:,} steps; curves in {self.workdir / 'curves.png'}, numbers in {self.workdir / METRICS}")
        return self.evaluation

    def report(self, step: int) -> None:
        """Writes `results.json` and prints the first and the last evaluation beside the baseline."""
        baseline = self.task.baseline()
        results = {"step": step, "seed": self.config.seed, **self.evaluation, "baseline": baseline}
        workdirs.write_atomically(self.workdir / RESULTS, json.dumps(results, indent=1) + "\n")
        first = next((_evaluation(line) for line in self.writers.history() if "eval_loss" in line), {})
        say(f"{'held out':<18}{'before':>10}{'after':>10}{'no context':>12}")
        for name in self.task.metrics:
            if name in self.evaluation:
                guess = f"{baseline[name]:.4f}" if name in baseline else ""
                say(f"{name:<18}{first.get(name, math.nan):>10.4f}{self.evaluation[name]:>10.4f}{guess:>12}")

    def after_step(self, state: TrainState, step: int, phase: Phase) -> TrainState:
        """Logs, evaluates and saves where it is time to; in this order, so that a checkpoint has all before it."""
        config, last = self.config, step == self.config.steps
        if last or step % config.log_every == 0:
            state = self.log(state, step, phase)
        if last or step % config.eval_every == 0:
            self.evaluate(state, step)
        if last or step % config.checkpoint_every == 0:
            self.save(state)
        return state

    def stopping(self, step: int) -> bool:
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return bool(self.stop)

    def log(self, state: TrainState, step: int, phase: Phase) -> TrainState:
        """Fetches and resets the metric sums; the only time the loop waits for the device between saves."""
        self.check(state)
        values = means(jax.device_get(state.sums))
        values["loss"] = sum(values.get(name, 0.0) for name in self.task.losses)
        if self.first_loss is None:
            self.first_loss = values["loss"]
        limit = self.config.divergence_factor * self.first_loss
        tokens_per_second = self.clock.tokens_per_second(step, phase)
        flops = flops_per_token(self.task.model.config, phase.seq_len, phase.max_predictions)
        mfu = tokens_per_second * flops / self.peak if self.peak else math.nan
        left = self.clock.seconds_left(step, phase, self.task.phases)
        shown = "  ".join(f"{name} {value:.3f}" for name, value in values.items() if "accuracy" in name)
        say(
            f"step {step:,}/{self.config.steps:,}  loss {values['loss']:.3f}  {shown}  "
            f"{tokens_per_second:,.0f} tokens/s  MFU {100 * mfu:.1f} %  left {duration(left)}"
        )
        if self.writers:
            self.writers.write(
                METRICS, step, {**values, "learning_rate": float(self.schedule(step - 1)), "tokens": self.tokens(step)}
            )
            self.writers.write(TIMING, step, {"tokens_per_second": tokens_per_second, "mfu": mfu})
        if values["loss"] > limit:
            self.fail(f"the loss diverged at step {step:,}: {values['loss']:.4g}, first logged {self.first_loss:.4g}")
        return zero_sums(state)

    def tokens(self, step: int) -> int:
        """Tokens of all rows up to a step, padding included."""
        return sum(
            max(0, min(step, phase.stop_step) - phase.start_step) * phase.batch_size * phase.seq_len
            for phase in self.task.phases
        )

    def evaluate(self, state: TrainState, step: int) -> None:
        start = time.monotonic()
        self.evaluation = _evaluate(self.task, self.mesh, self.eval_step, state.params)
        shown = "  ".join(f"{name} {value:.4f}" for name, value in self.evaluation.items())
        say(f"step {step:,} held out: {shown}  ({time.monotonic() - start:.1f} s)")
        if self.writers:
            values = {f"eval_{name}": value for name, value in self.evaluation.items()}
            self.writers.write(METRICS, step, {**values, "tokens": self.tokens(step)})
            draw_curves(self.writers.history(), self.workdir / "curves.png")
        self.clock.pause(time.monotonic() - start)

    def save(self, state: TrainState) -> None:
        start = time.monotonic()
        self.check(state)
        self.checkpoints.save(state)
        self.clock.pause(time.monotonic() - start)

    def check(self, state: TrainState) -> None:
        bad_step = int(jax.device_get(state.bad_step))
        if bad_step >= 0:
            self.fail(f"the loss or gradient of step {bad_step:,} is not finite")

    def fail(self, what: str) -> None:
        self.checkpoints.wait()
        last = self.checkpoints.latest_step()
        good = (
            f"the last good checkpoint is {self.checkpoints.path(last)}" if last is not None else "none was saved yet"
        )
        raise BertjaxError(
            f"{what}; {good}. Try a lower optimizer.learning_rate or a longer warm-up, in a new --workdir"
        )


def _evaluation(line: dict[str, float]) -> dict[str, float]:
    return {name.removeprefix("eval_"): value for name, value in line.items() if name.startswith("eval_")}


class _Clock:
    """Speed since the last log line, evaluation and saving left out, and the time left."""

    def __init__(self, step: int) -> None:
        self.started = time.monotonic()
        self.first_step_seconds: float | None = None
        self.since, self.step, self.paused = self.started, step, 0.0
        self.speed = 0.0

    def first_step_done(self, step: int) -> None:
        """Starts measuring after the first step, which compiles."""
        self.first_step_seconds = time.monotonic() - self.started - self.paused
        say(f"first step after {self.first_step_seconds:.1f} s, compilation included")
        self.since, self.step, self.paused = time.monotonic(), step, 0.0

    def pause(self, seconds: float) -> None:
        self.paused += seconds

    def tokens_per_second(self, step: int, phase: Phase) -> float:
        """Since the last call; the last figure again if no step was taken since."""
        if step > self.step:
            seconds = time.monotonic() - self.since - self.paused
            self.speed = (step - self.step) * phase.batch_size * phase.seq_len / max(seconds, 1e-9)
        self.since, self.step, self.paused = time.monotonic(), step, 0.0
        return self.speed

    def seconds_left(self, step: int, phase: Phase, phases: tuple[Phase, ...]) -> float:
        """At the speed of now, counted in tokens."""
        tokens = sum(
            (each.stop_step - max(step, each.start_step)) * each.batch_size * each.seq_len
            for each in phases
            if each.stop_step > step
        )
        return tokens / self.speed if self.speed else 0.0
