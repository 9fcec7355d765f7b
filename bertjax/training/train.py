"""The training loop of all tasks: start or resume, then step, log, evaluate, save, profile, stop."""

import contextlib
import dataclasses
import json
import logging
import math
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from bertjax.config.run import RunConfig
from bertjax.data.corpus.vocabulary import ENTRY
from bertjax.errors import BertjaxError, UsageError
from bertjax.metrics.report import ClassReport
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.task import Task
from bertjax.training import workdir as workdirs
from bertjax.training.checkpoint import Checkpoints, find_checkpoint, saved_fingerprint
from bertjax.training.checkpoint_metadata import model_metadata
from bertjax.training.evaluation import add_loss, check_batch_sizes, check_labeled, evaluate, predict
from bertjax.training.init_from import check_vocabulary
from bertjax.training.metrics import METRICS, read_lines
from bertjax.training.multihost import assert_same_run, assert_shared_workdir, raise_on_all_hosts
from bertjax.training.optimizer import bert_schedule, make_optimizer
from bertjax.training.parameters import load_params
from bertjax.training.preemption import stop_requests, watchdog
from bertjax.training.profiling import StepProfiler
from bertjax.training.progress import Progress, evaluation_of
from bertjax.training.results import log_reports, log_results, write_results
from bertjax.training.sharding import data_shard, make_mesh, put_batch, replicated
from bertjax.training.step import (
    TOKEN_FRACTION,
    TrainState,
    abstract_state,
    compute_metrics,
    init_state,
    make_train_step,
    reset_sums,
)

logger = logging.getLogger(__name__)


def train(
    task: Task,
    path: str,
    init_from: str | None = None,
    *,
    profile_steps: range = range(0),
    trackers: Sequence[str] = (),
) -> dict[str, Any]:
    """Trains to the last step, or until SIGTERM or Ctrl-C.

    Args:
      task: task with training data.
      path: workdir; an existing run is resumed.
      init_from: checkpoint whose parameters a new run starts with, at step 0 and with a new optimizer state.
      profile_steps: steps to profile.
      trackers: experiment trackers to log to.

    Returns:
      `step`, `stopped` (by a signal), and the metrics of the last evaluation; of a finished run `checkpoint`, the best
      one, and its metrics.

    Raises:
      UsageError: the workdir belongs to another config or other data, the mesh does not fit the batch, or the
        evaluation data has no labels.
      BertjaxError: workdir or disk unusable, all checkpoints damaged, or a loss that diverges or is not finite.
    """
    config = task.config
    check_labeled(task)
    mesh = make_mesh(config.mesh)
    check_batch_sizes(task, mesh, config.grad_accum_steps)
    optimizer = make_optimizer(config.optimizer)
    schedule = bert_schedule(config.optimizer.learning_rate, task.warmup_steps, task.total_steps)
    train_step = make_train_step(task.objective, optimizer, mesh, config.grad_accum_steps)
    abstract = abstract_state(task.objective, optimizer, mesh)
    for note in task.notes:
        logger.info(note)
    if task.warmup_steps >= task.total_steps:
        logger.info(
            f"warm-up takes {task.warmup_steps:,} of {task.total_steps:,} steps, so the learning rate does not reach "
            f"{config.optimizer.learning_rate:g}; see config.optimizer.warmup_steps"
        )

    with contextlib.ExitStack() as stack:
        workdir, checkpoints, check_owner = _open_workdir(task, path, init_from, abstract, stack)
        stop_requested = stack.enter_context(stop_requests())
        heartbeat = stack.enter_context(watchdog(config.hang_seconds))
        state = _restore_or_init(task, mesh, workdir, checkpoints, init_from, abstract, optimizer)
        step = int(state.step)
        progress = stack.enter_context(contextlib.closing(Progress(task, workdir, step, schedule, trackers)))
        profiler = stack.enter_context(StepProfiler(workdir, profile_steps))
        key, device_schedule = jax.jit(
            lambda: (random_key(config.seed, "dropout"), jax.tree.map(jnp.asarray, schedule)),
            out_shardings=replicated(mesh),
        )()

        if step == 0 and task.eval_first:
            start = time.monotonic()
            values = _check_finite(evaluate(task, mesh, state.params, heartbeat), step, checkpoints)
            progress.log_evaluation(step, values, time.monotonic() - start, token_fraction=0.0)

        # A run that is out of patience may have been killed before it could finish.
        done, stopped = step >= task.total_steps or progress.is_out_of_patience(), False
        batches = task.train_batches(step, data_shard(mesh))
        while not (done or stopped):
            batch = put_batch(next(batches), mesh)
            # Only the batch moves between host and devices.
            with profiler.step(step), jax.transfer_guard("disallow"):
                state = train_step(state, batch, key, device_schedule)
            step += 1
            progress.step_done(step, state.step)
            profiler.step_done(step, state)
            heartbeat()
            done, stopped = step == task.total_steps, stop_requested(step)

            # Lines are written before a checkpoint, so that a run resumed from it has all of them.
            if done or step % config.log_every == 0:
                state = _log_step(task, state, step, progress, checkpoints)

            if task.eval_every and (done or step % task.eval_every == 0):
                # Steps under way are training time, not evaluation time.
                jax.block_until_ready(state.step)
                start = time.monotonic()
                with progress.paused():
                    values = _check_finite(evaluate(task, mesh, state.params, heartbeat), step, checkpoints)
                    token_fraction = compute_metrics(jax.device_get(state.sums)).get(TOKEN_FRACTION, 0.0)
                    progress.log_evaluation(step, values, time.monotonic() - start, token_fraction)
                if not done and progress.is_out_of_patience():
                    done = True
                    if step % config.log_every:
                        state = _log_step(task, state, step, progress, checkpoints)

            if done or stopped or step % task.checkpoint_every == 0 or progress.is_best_at(step):
                _check_bad_step(state, checkpoints)
                with progress.paused():
                    check_owner()
                    progress.flush()
                    checkpoints.save(state, progress.score_at(step), progress.metric_lines)
                heartbeat()

        checkpoints.wait()
        if stopped and not done:
            logger.info(f"stopped by a signal; saved step {step:,}; run the same command to resume")
            return {"step": step, "stopped": True, **progress.evaluation_at(step)}
        _check_data(task, step)
        best = checkpoints.best()
        values = _finish(task, mesh, state, workdir, best, step, progress)
        return {"step": step, "stopped": False, "checkpoint": str(best), **values}


def random_key(seed: int, purpose: str) -> jax.Array:
    """Returns the random key of a purpose such as "init" or "dropout"; its users fold in the step."""
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(purpose.encode()))


def _open_workdir(
    task: Task, path: str, init_from: str | None, abstract: TrainState, stack: contextlib.ExitStack
) -> tuple[epath.Path, Checkpoints, Any]:
    """Creates and locks the workdir, checks that it belongs to this run, and opens its checkpoints."""
    config, start = dataclasses.asdict(task.config), ""
    if init_from:
        checkpoint = find_checkpoint(init_from)
        check_vocabulary(task, checkpoint)
        start = saved_fingerprint(checkpoint)
    # Paths of the vocabulary and of labels may differ between hosts, their content may not.
    files = {name: json.loads(task.workdir_files[name]) for name in (ENTRY, OUTPUT_LAYER) if name in task.workdir_files}
    model = task.objective.model
    run = {"config": config, "data": task.data_hash, "started_from": start, "files": files, **model_metadata(model)}
    assert_same_run(run)
    workdir = workdirs.create(path)
    assert_shared_workdir(workdir)
    stack.enter_context(workdirs.acquire_lock(workdir))
    workdirs.check_config(workdir, config, task.data_hash)
    workdirs.check_checkpoint_space(workdir, abstract)
    workdirs.write_config(workdir, config, task.data_hash, start)
    check_owner = workdirs.take_ownership(workdir)
    workdirs.write_files(workdir, task.workdir_files)
    checkpoints = Checkpoints(workdir, task.config.keep_checkpoints, model, task.checkpoint_every)
    return workdir, stack.enter_context(contextlib.closing(checkpoints)), check_owner


def _restore_or_init(
    task: Task,
    mesh: Mesh,
    workdir: epath.Path,
    checkpoints: Checkpoints,
    init_from: str | None,
    abstract: TrainState,
    optimizer: Any,
) -> TrainState:
    """Resumes the run of the workdir; else initializes the state, with the parameters of `init_from` if given."""
    state = checkpoints.restore_latest(abstract)
    if state is not None:
        started_from = workdirs.saved_init_fingerprint(workdir)
        if task.features_fingerprint and task.features_fingerprint != started_from:
            raise UsageError(
                f"the run of {workdir} started from other parameters than --init_from, so its features differ; give "
                "the checkpoint it started from, or another --workdir"
            )
        ignored = "; --init_from is ignored" if init_from else ""
        if init_from and saved_fingerprint(find_checkpoint(init_from)) != started_from:
            ignored += ", and the run started from other parameters"
        logger.info(f"resumed {workdir} at step {int(state.step):,}{ignored}")
        return state
    state = init_state(task.objective, optimizer, mesh, random_key(task.config.seed, "init"))
    if init_from:
        state = state.replace(params=load_params(init_from, state.params, task.reinit_params))
        logger.info(f"starting at step 0 with the parameters of {init_from}")
    return state


def _log_step(task: Task, state: TrainState, step: int, progress: Progress, checkpoints: Checkpoints) -> TrainState:
    """Logs the metrics since the last logged step, checks them, and returns the state with its sums at zero."""
    _check_bad_step(state, checkpoints)
    _check_data(task, None)
    values = add_loss(compute_metrics(jax.device_get(state.sums)), task.objective)
    progress.log_step(step, values)
    _check_divergence(step, values, progress.first_loss, task.config, checkpoints)
    return reset_sums(state)


def _finish(
    task: Task, mesh: Mesh, state: TrainState, workdir: epath.Path, best: epath.Path, step: int, progress: Progress
) -> dict[str, float]:
    """Writes the result of the best checkpoint and returns its metrics."""
    best_step = int(best.name)
    evaluations = [evaluation_of(line) for line in read_lines(workdir / METRICS) if line["step"] == best_step]
    evaluations = [evaluation for evaluation in evaluations if evaluation]
    if not evaluations and progress.evaluation:
        logger.info(f"{workdir / METRICS} lacks the evaluation of step {best_step:,}; the result is of the last one")
    values = evaluations[-1] if evaluations else progress.evaluation
    reports = _class_reports(task, mesh, best, state)
    if jax.process_index() == 0:
        baseline = write_results(workdir, task, best, step, values, reports)
        log_results(values, progress.first_evaluation if task.eval_first else {}, baseline)
        log_reports(reports)
        progress.plot_curves()
        if step < task.total_steps:
            logger.info(
                f"stopped early at step {step:,} of {task.total_steps:,}: no better {task.best_metric} in "
                f"{task.patience:,} evaluation{'s' * (task.patience > 1)}"
            )
        logger.info(f"done: {step:,} steps in {progress.elapsed()}; best checkpoint {best}")
        logger.info(f"curves in {workdir / workdirs.CURVES}, metrics in {workdir / METRICS}")
    return values


def _class_reports(task: Task, mesh: Mesh, best: epath.Path, state: TrainState) -> dict[str, ClassReport]:
    """Returns the class reports of the best checkpoint."""
    if not task.has_class_reports or not task.eval_every:
        return {}
    params = state.params
    if int(best.name) != int(state.step):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        params = load_params(best, shapes)
    return task.class_reports(predict(task, mesh, params)[1])


def _check_data(task: Task, steps: int | None) -> None:
    """Raises on all hosts if any of them found its data damaged."""

    def check() -> None:
        try:
            task.check_data(steps)
        except BertjaxError as error:
            raise BertjaxError(
                f"{error}; checkpoints of this run may be affected, so train in a new --workdir"
            ) from error

    raise_on_all_hosts(check)


def _check_bad_step(state: TrainState, checkpoints: Checkpoints) -> None:
    """Raises if a step had a loss or gradient that is not finite; waits for the steps under way."""
    bad_step = int(jax.device_get(state.bad_step))
    if bad_step >= 0:
        raise _failure(f"the loss or gradient of step {bad_step:,} is not finite", checkpoints)


def _check_finite(values: dict[str, float], step: int, checkpoints: Checkpoints) -> dict[str, float]:
    if not math.isfinite(values.get("loss", 0.0)):
        raise _failure(f"the evaluation loss at step {step:,} is not finite", checkpoints)
    return values


def _check_divergence(
    step: int, values: dict[str, float], first_loss: float | None, config: RunConfig, checkpoints: Checkpoints
) -> None:
    if first_loss is not None and values.get("loss", 0.0) > config.divergence_factor * first_loss:
        raise _failure(
            f"the loss diverged at step {step:,}: {values['loss']:.4g}, first logged {first_loss:.4g}", checkpoints
        )


def _failure(problem: str, checkpoints: Checkpoints) -> BertjaxError:
    checkpoints.wait()
    last = checkpoints.latest_step()
    good = "no checkpoint was saved yet" if last is None else f"the last good checkpoint is {checkpoints.path(last)}"
    error = BertjaxError(
        f"{problem}; {good}; use a lower optimizer.learning_rate or a longer warm-up, in a new --workdir"
    )
    error.on_all_hosts = True  # Loss and gradient are replicated.
    return error
