"""Training loop of all tasks, with logs, evaluations, checkpoints and profiles."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from bertjax.errors import BertjaxError, DivergenceError, UsageError
from bertjax.tasks.task import Task
from bertjax.training.compatibility import check_vocabulary
from bertjax.training.evaluation import evaluate
from bertjax.training.metrics import evaluation_metrics, import_tracker
from bertjax.training.multihost import raise_on_all_hosts
from bertjax.training.optimizer import describe_head_steps, make_optimizer, make_schedule
from bertjax.training.preemption import Heartbeat, stop_requests, watchdog
from bertjax.training.profiling import StepProfiler
from bertjax.training.progress import Progress
from bertjax.training.results import EvaluationHistory, read_log, write_results
from bertjax.training.sharding import check_batch_sizes, data_shard, make_mesh, put_batch, replicated
from bertjax.training.start import check_resume, init_from_checkpoint
from bertjax.training.step import (
    TrainState,
    abstract_state,
    make_init_opt_state,
    make_init_state,
    make_train_step,
    metric_means,
    random_key,
)
from bertjax.training.workdir import open_workdir

logger = logging.getLogger(__name__)

# Lower bound of the first loss in the divergence check, because contrastive losses may start near 0.
_MIN_FIRST_LOSS = 0.1


def train(
    task: Task,
    path: str,
    init_from: epath.Path | None = None,
    *,
    profile_steps: range = range(0),
    trackers: Sequence[str] = (),
    keep_optimizer: bool = False,
) -> dict[str, Any]:
    """Trains to the last step, or until early stopping or a signal (SIGTERM, SIGINT or SIGHUP).

    Args:
      task: task with training data.
      path: workdir; an existing run is resumed.
      init_from: checkpoint with the initial parameters of a new run. The run starts at step 0.
      profile_steps: steps to profile.
      trackers: names of experiment trackers, `wandb` or `trackio`.
      keep_optimizer: whether a new run starts with the optimizer state of `init_from`.

    Returns:
      `step`: number of steps done.
      `stopped`: whether a signal stopped the run.
      For a finished run, also the metrics of the best checkpoint, and its path (`checkpoint`). For a stopped run, also
      the metrics of the last step, if it was evaluated.

    Raises:
      UsageError: config, data, mesh, workdir and `init_from` do not fit together.
      BertjaxError: the workdir, all checkpoints or the data are damaged, or the loss diverges or is not finite.
    """
    config = task.config
    # Raise most errors here, before the workdir is created.
    if task.evaluation_problem:
        raise UsageError(task.evaluation_problem)
    for name in trackers:
        import_tracker(name)
    mesh = make_mesh(config.mesh)
    check_batch_sizes(task.batch_sizes, mesh, config.grad_accum_steps)
    if task.eval_every:
        check_batch_sizes((task.eval_batch_size,), mesh)
    optimizer = make_optimizer(config.optimizer, task.objective.untrained_modules)
    schedule = make_schedule(config.optimizer, task.warmup_steps, task.phase_schedule)
    head_steps = config.optimizer.head_steps  # number of first steps that train only parameters outside the encoder

    def train_step_at(step: int) -> Callable[..., TrainState]:
        # The RoPE thetas of a phase are a part of its objective. Step s is update s + 1. `make_train_step` is cached.
        objective = task.objective_at(step + 1)
        return make_train_step(objective, optimizer, mesh, config.grad_accum_steps, head_only=step < head_steps)

    train_step_at(0)  # Raises if the step cannot be built.
    state_shapes = abstract_state(task.objective, optimizer, mesh)
    if keep_optimizer and (task.output_params or head_steps):  # Fine-tuning tasks have `output_params`.
        raise UsageError("--keep_optimizer needs a pre-training config without head_steps; omit --keep_optimizer")
    new_pieces = None
    if init_from:
        # With `keep_optimizer`, pieces cannot be added, because the saved optimizer state lacks their moments.
        new_pieces = check_vocabulary(task, init_from, task.objective.can_add_pieces and not keep_optimizer)
    for note in (*task.notes, *describe_head_steps(config.optimizer)):
        logger.info(note)

    with contextlib.ExitStack() as stack:
        # Local workdirs are locked. For `gs://`, `check_still_owner` raises if another run has taken the workdir over.
        opened = stack.enter_context(open_workdir(task, path, init_from, state_shapes))
        workdir, checkpoints, check_still_owner = opened
        stop_requested = stack.enter_context(stop_requests())
        heartbeat = stack.enter_context(watchdog(config.hang_seconds))
        init = partial(make_init_state(task.objective, optimizer, mesh), random_key(config.seed, "init"))
        state = checkpoints.restore_latest(state_shapes, init)  # `init` fills fields that a checkpoint lacks.
        if state is not None:
            check_resume(task, workdir, int(state.step), init_from)
        elif init_from is None:
            state = init()
            logger.info("starting at step 0 with random parameters, because --init_from is not set")
        else:
            state = init_from_checkpoint(init_from, init(), task, new_pieces, state_shapes if keep_optimizer else None)
        step = int(state.step)  # number of updates so far, and index of the next step
        # Lines of `metrics.jsonl` up to `step`. `Progress` deletes later lines, because this run logs them again.
        logged = read_log(task, workdir, step) if step else []
        evaluations = {line["step"]: metrics for line in logged if (metrics := evaluation_metrics(line))}
        history = EvaluationHistory(task.best_metric, config.patience, evaluations)
        progress = stack.enter_context(contextlib.closing(Progress(task, workdir, step, logged, trackers)))
        profiler = stack.enter_context(StepProfiler(workdir, profile_steps))
        # `schedule` is a `jax.tree_util.Partial`, whose numbers are leaves. Replicate with `jit`, because `device_put`
        # would first compare the values on all hosts.
        dropout_key, device_schedule = jax.jit(
            lambda: (random_key(config.seed, "dropout"), jax.tree.map(jnp.asarray, schedule)),
            out_shardings=replicated(mesh),
        )()

        # A checkpoint stores the score of its step, so with a score, evaluate before saving. Without a score, as in
        # pre-training, save first, because a preempted host may lack the time to evaluate. The resumed run evaluates.
        has_score = task.best_metric is not None

        def save(state: TrainState, step: int) -> None:
            _check_steps_finite(state)
            with progress.paused():
                check_still_owner()
                metrics_sha256 = progress.flush()  # With this hash, `read_log` detects lost lines after a resume.
                # The score is None if this step was not evaluated.
                checkpoints.save(state, history.score_at(step), metrics_sha256)
            heartbeat()

        def evaluate_if_due(state: TrainState, step: int) -> None:
            nonlocal history
            if not task.eval_every or history.metrics_at(step):
                return
            is_due = task.eval_first if step == 0 else step % task.eval_every == 0
            if is_due or step == task.total_steps:
                history = history.add(step, _evaluate(task, mesh, state, step, progress, heartbeat))

        def is_done(step: int) -> bool:
            return step >= task.total_steps or history.is_out_of_patience()

        # With `has_score`, do not evaluate a restored step, which only a changed `eval_every` makes due: its checkpoint
        # is already saved without a score.
        if step == 0 or not has_score:
            evaluate_if_due(state, step)

        # A run that was killed between early stopping and writing `results.json` must not train further.
        done, stopped = is_done(step), False
        if done and step < task.total_steps:
            logger.info("the run has stopped early; raise config.patience to continue it")
        batches = task.train_batches(step, data_shard(mesh))
        while not (done or stopped):
            batch = put_batch(next(batches), mesh)
            if head_steps and step == head_steps and config.optimizer.name != "bert_adam":
                # Reset the optimizer before the first update of the encoder, because its update count for bias
                # correction includes the head steps. BERT's Adam has no bias correction.
                state = state.replace(opt_state=make_init_opt_state(task.objective, optimizer, mesh)(state.params))
            with profiler.step(step):
                state = train_step_at(step)(state, batch, dropout_key, device_schedule)
            step += 1
            progress.step_done(step, state)
            profiler.step_done(step, state)
            heartbeat()
            if has_score:
                evaluate_if_due(state, step)
            done = is_done(step)
            stopped = not done and stop_requested()  # the same on all hosts
            # Log and reset the metric sums before saving. Otherwise, a resumed run would log them again.
            if done or step % config.log_every == 0:
                state = _log_and_reset(task, state, step, progress)
            if done or stopped or step % task.checkpoint_every == 0 or history.is_best_at(step):
                save(state, step)
            if not stopped:
                evaluate_if_due(state, step)  # This returns at once if the step has been evaluated.

        checkpoints.wait()
        if stopped:
            logger.info(f"stopped by a signal; saved step {step:,}; run the same command to resume")
            return {"step": step, "stopped": True, **history.metrics_at(step)}
        heartbeat(math.inf)  # Suspend the watchdog: after a resume at the last step, verifying the data may take hours.
        _check_data_files(task, wait=True)
        heartbeat()
        progress.plot_curves()
        checkpoint, values = write_results(task, mesh, state, workdir, checkpoints, history, progress, heartbeat)
        progress.finish(step, checkpoint)
        return {"step": step, "stopped": False, "checkpoint": str(checkpoint), **values}


def _log_and_reset(task: Task, state: TrainState, step: int, progress: Progress) -> TrainState:
    """Logs and checks the metrics since the last logged step. Returns the state with its metric sums reset to 0."""
    _check_steps_finite(state)
    _check_data_files(task)
    values = metric_means(state.sums, task.objective.loss_weights)
    progress.log_step(step, values)
    first_loss = progress.first_loss
    loss = values.get("loss", 0.0)  # There is no loss if all weights since the last logged step are 0.
    if loss > task.config.divergence_factor * max(first_loss, _MIN_FIRST_LOSS):
        raise DivergenceError(f"the loss diverged at step {step:,}: {loss:.4g} (first logged loss: {first_loss:.4g})")
    return state.replace(sums=jax.tree.map(jnp.zeros_like, state.sums))


def _evaluate(
    task: Task, mesh: Mesh, state: TrainState, step: int, progress: Progress, heartbeat: Heartbeat
) -> dict[str, float]:
    _check_steps_finite(state)  # This waits for the dispatched steps, so evaluation time includes no training time.
    with progress.paused():
        start = time.monotonic()
        values, _ = evaluate(task, mesh, state.eval_params, heartbeat, step)
        if not math.isfinite(values.get("loss", 0.0)):
            raise DivergenceError(f"the evaluation loss at step {step:,} is not finite")
        # Pass the metric sums since the last log line, so that the number of tokens seen includes these steps.
        progress.log_evaluation(step, values, time.monotonic() - start, train_sums=state.sums)
    return values


def _check_steps_finite(state: TrainState) -> None:
    """Waits for all dispatched steps. Raises if the loss or gradient of any step was not finite."""
    bad_step = int(state.bad_step)
    if bad_step >= 0:
        raise DivergenceError(f"the loss or gradient of step {bad_step:,} is not finite")


def _check_data_files(task: Task, wait: bool = False) -> None:
    """Raises on all hosts if any host has found damaged data. With `wait`, verifies all data first."""
    with raise_on_all_hosts():
        try:
            task.check_data_files(wait)
        except BertjaxError as error:
            raise BertjaxError(f"{error}; checkpoints may be affected, so train in a new --workdir") from error
