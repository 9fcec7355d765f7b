"""The one loop every task runs through: start or resume, step, log, evaluate, save."""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh

from bertjax.config.run import RunConfig
from bertjax.errors import BertjaxError, UsageError
from bertjax.metrics.report import ClassReport
from bertjax.tasks.task import Objective, Task
from bertjax.training import workdir as workdirs
from bertjax.training.agreement import check_same_run, check_shared, raise_on_all_hosts
from bertjax.training.checkpoint import Checkpoints, find_checkpoint, saved_fingerprint
from bertjax.training.checkpoint_metadata import identity_of
from bertjax.training.init_from import check_vocabulary
from bertjax.training.optimizer import LearningRate, make_optimizer
from bertjax.training.parameters import load_params
from bertjax.training.preemption import stop_requests
from bertjax.training.progress import Progress
from bertjax.training.sharding import batch_shards, data_shard, make_mesh, put_batch, replicated
from bertjax.training.step import (
    TOKEN_FRACTION,
    TrainState,
    abstract_state,
    compute_metrics,
    init_state,
    make_eval_step,
    make_train_step,
    zero_sums,
)
from bertjax.training.watchdog import watchdog
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)


def train(settings: RunConfig, task: Task, path: str, init_from: str | None = None) -> dict[str, Any]:
    """Trains to the last step, or until SIGTERM or Ctrl-C.

    Returns:
      The step reached, whether a signal `stopped` it there, and the last evaluation's metrics; of a finished run those
      of the best checkpoint, and its path.

    Args:
      settings: of the whole run.
      task: built from the same settings.
      path: the workdir; a run found there goes on where it stopped.
      init_from: checkpoint whose parameters a new run starts from, with step 0 and a fresh optimizer.

    Raises:
      UsageError: the workdir belongs to another config or other data, the mesh does not fit the batch, or what is to be
        evaluated has no labels.
      BertjaxError: workdir or disk unusable, all checkpoints damaged, or the loss is not finite or diverges.
    """
    check_labelled(task)
    mesh = make_mesh(settings.mesh)
    check_batches(task, mesh, settings.grad_accum_steps)
    start = ""
    if init_from:
        check_vocabulary(task, find_checkpoint(init_from))
        start = saved_fingerprint(find_checkpoint(init_from))
    identity = identity_of(task.objective.model.config.architecture, task.files, vars(settings.data))
    optimizer = make_optimizer(settings.optimizer)
    abstract = abstract_state(task.objective, optimizer, mesh)
    for note in task.notes:
        logger.info(note)
    told = {"config": dataclasses.asdict(settings), "data": task.data_hash, "started_from": start, "identity": identity}
    check_same_run(told)
    workdir = workdirs.make(path)
    check_shared(workdir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(workdirs.lock(workdir))
        workdirs.claim(workdir, dataclasses.asdict(settings), task.data_hash, start, abstract)
        check_ours = workdirs.take(workdir)
        stop_requested = stack.enter_context(stop_requests())
        hear = stack.enter_context(watchdog(settings.hang_seconds))
        workdirs.keep_files(workdir, task.files)
        every = task.schedule.checkpoint_every
        checkpoints = Checkpoints(workdir, settings.keep_checkpoints, identity, every)
        stack.enter_context(contextlib.closing(checkpoints))
        # In this order: a run of this workdir goes on; else `init_from` gives parameters alone; else from scratch.
        state = checkpoints.restore_latest(abstract)
        if state is not None:
            began_with = workdirs.started_from(workdir)
            if task.states_of and task.states_of != began_with:
                raise UsageError(
                    f"the run of {workdir} began with other parameters than --init_from has, so its features are "
                    "others; give those that it began with, or another --workdir"
                )
            logger.info(f"going on from step {int(state.step):,} of {workdir}")
            if init_from:
                other = "" if began_with == start else ", which began with other parameters,"
                logger.info(f"--init_from is not used: the run of this workdir{other} goes on")
        else:
            state = init_state(task.objective, optimizer, mesh, _key(settings.seed, "init"))
            if init_from:
                state = state.replace(params=load_params(init_from, state.params, task.fresh))
                logger.info(f"starting at step 0 with the parameters of {init_from}")
        progress = stack.enter_context(contextlib.closing(Progress(settings, task, workdir, int(state.step))))
        train_step = make_train_step(task.objective, optimizer, mesh, settings.grad_accum_steps)
        return _run(settings, task, mesh, train_step, state, checkpoints, progress, stop_requested, hear, check_ours)


def _run(
    settings: RunConfig,
    task: Task,
    mesh: Mesh,
    train_step: Callable[..., TrainState],
    state: TrainState,
    checkpoints: Checkpoints,
    progress: Progress,
    stop_requested: Callable[[int], bool],
    hear: Callable[[], None],
    check_ours: Callable[[], None],
) -> dict[str, Any]:
    schedule = task.schedule
    scalars = LearningRate(settings.optimizer.learning_rate, schedule.warmup_steps, schedule.steps)
    key, rate = jax.jit(
        lambda: (_key(settings.seed, "dropout"), jax.tree.map(jnp.asarray, scalars)), out_shardings=replicated(mesh)
    )()

    def evaluate_now(step: int) -> None:
        # Steps that are still under way belong to training, not to the evaluation.
        jax.block_until_ready(state.step)
        start = time.monotonic()
        with progress.paused():
            values = evaluate(task, mesh, state.params, hear)
            if not math.isfinite(values.get("loss", 0.0)):
                raise _failure(f"the held-out loss at step {step:,} is not finite", checkpoints)
            progress.evaluated(
                step,
                values,
                time.monotonic() - start,
                compute_metrics(jax.device_get(state.sums)).get(TOKEN_FRACTION, 0.0),
            )

    def save_now() -> None:
        _refuse_bad_step(state, checkpoints)  # which waits for the steps under way
        with progress.paused():
            check_ours()
            progress.flush()
            checkpoints.save(state, progress.score_at(step), progress.metric_lines)
        hear()

    def log_now() -> None:
        nonlocal state
        _refuse_bad_step(state, checkpoints)
        _refuse_damage(task, None)
        values = _with_loss(compute_metrics(jax.device_get(state.sums)), task.objective)
        state = zero_sums(state)
        progress.log(step, values)
        _refuse_divergence(step, values, progress.first_loss, settings.divergence_factor, checkpoints)

    step = int(state.step)
    if step == 0 and schedule.eval_first:
        evaluate_now(step)
    # A run that had waited long enough may have been killed before it could say so.
    if step < schedule.steps and not progress.is_out_of_patience():
        for batch in task.train_batches(step, data_shard(mesh)):
            rows = put_batch(batch, mesh)
            # The batch is all that moves between host and devices.
            with jax.transfer_guard("disallow"):
                state = train_step(state, rows, key, rate)
            step += 1
            progress.stepped(step, state.step)
            hear()
            last, stop = step == schedule.steps, stop_requested(step)
            # In this order, so that a checkpoint has all lines before it. The loop waits for the devices here alone.
            logged = last or step % settings.log_every == 0
            if logged:
                log_now()
            if schedule.eval_every and (last or step % schedule.eval_every == 0):
                evaluate_now(step)
                last = last or progress.is_out_of_patience()
                if last and not logged:
                    log_now()
            # Parameters that nobody saved when they were the best cannot be the result.
            if last or stop or step % schedule.checkpoint_every == 0 or progress.is_best_at(step):
                save_now()
            if stop and not last:
                checkpoints.wait()
                logger.info(f"stopped by a signal at step {step:,}; saved. The same command goes on from here")
                return {"step": step, "stopped": True, **progress.evaluation_at(step)}
            if last:
                break
    checkpoints.wait()
    _refuse_damage(task, step)
    best = checkpoints.best()
    values = progress.finished(step, best, _per_class(task, mesh, best, state))
    return {"step": step, "stopped": False, "checkpoint": str(best), **values}


def _per_class(task: Task, mesh: Mesh, best: epath.Path, state: TrainState) -> dict[str, ClassReport]:
    """What became of each class with the parameters of the best checkpoint; {} where the task has none."""
    if task.per_class is None:
        return {}
    params = state.params
    if int(best.name) != int(state.step):
        params = load_params(best, jax.tree.map(_abstract, params))
    return task.per_class(predict(task, mesh, params)[1])


def _abstract(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def evaluate(task: Task, mesh: Mesh, params: Any, hear: Callable[[], None] = lambda: None) -> dict[str, float]:
    """Metrics over all evaluation batches, and the loss that some of them add up to; `hear` is called after each."""
    return task.score(*predict(task, mesh, params, hear))


def predict(
    task: Task, mesh: Mesh, params: Any, hear: Callable[[], None] = lambda: None
) -> tuple[dict[str, float], list[dict[str, np.ndarray]]]:
    """Means of the evaluation's sums, with their loss, and the outputs of its batches, in order."""
    eval_step = make_eval_step(task.objective, mesh)
    names = task.objective.metrics
    sums = jax.jit(lambda: {name: jnp.zeros(2) for name in names}, out_shardings=replicated(mesh))()
    outputs = []
    shown = jax.process_index() == 0
    with progress_bar("evaluation", task.eval_steps or None, " batches", shown, after_seconds=2) as bar:
        for batch in task.eval_batches(data_shard(mesh)):
            sums, output = eval_step(params, put_batch(batch, mesh), sums)
            outputs.append(output)
            # While a batch is computed the one before is fetched: devices have no room for the outputs of a whole set.
            outputs[-2:-1] = jax.device_get(outputs[-2:-1])
            bar.update()
            hear()
    return _with_loss(compute_metrics(jax.device_get(sums)), task.objective), jax.device_get(outputs)


def check_labelled(task: Task) -> None:
    """Refuses to measure anything on examples without labels.

    Raises:
      UsageError: names the files.
    """
    if task.unlabelled:
        raise UsageError(
            f"{task.unlabelled} is read without labels, so there are no metrics; `bertjax predict` writes what the "
            "model says, and --config.data.eval_split=dev evaluates the dev set"
        )


def check_batches(task: Task, mesh: Mesh, grad_accum_steps: int) -> None:
    """Refuses batches that do not split evenly.

    Raises:
      UsageError: names the phase's batch and the parts.
    """
    parts = batch_shards(mesh) * grad_accum_steps
    for batch_size in task.batch_sizes:
        if batch_size % parts:
            raise UsageError(
                f"a batch of {batch_size} rows does not split over "
                f"{batch_shards(mesh)} data shards x {grad_accum_steps} micro-batches; make it a multiple of {parts}: rows "
                "are config.data.batch_size, over data.examples_per_row, and fewer where a long phase keeps tokens"
            )


def _with_loss(values: dict[str, float], objective: Objective) -> dict[str, float]:
    """The values with the loss that some of them add up to; where nothing adds up there is none, not one of 0."""
    parts = [values[name] for name in objective.losses if name in values]
    return {**values, "loss": sum(parts)} if parts else values


def _key(seed: int, purpose: str) -> jax.Array:
    """A random key for `init` and another for `dropout`; steps are folded in by whoever uses it."""
    return jax.random.fold_in(jax.random.key(seed), sum(purpose.encode()))


def _refuse_damage(task: Task, steps: int | None) -> None:
    try:
        elsewhere = BertjaxError("another process of this run found its data damaged, and says where")
        raise_on_all_hosts(lambda: task.check_data(steps), elsewhere)
    except BertjaxError as error:
        raise BertjaxError(f"{error}; what this run has saved may come of it: train in a new --workdir") from error


def _refuse_bad_step(state: TrainState, checkpoints: Checkpoints) -> None:
    bad_step = int(jax.device_get(state.bad_step))
    if bad_step >= 0:
        raise _failure(f"the loss or gradient of step {bad_step:,} is not finite", checkpoints)


def _refuse_divergence(
    step: int, values: dict[str, float], first: float | None, factor: float, checkpoints: Checkpoints
) -> None:
    if first is not None and values.get("loss", 0.0) > factor * first:
        what = f"the loss diverged at step {step:,}: {values['loss']:.4g}, first logged {first:.4g}"
        raise _failure(what, checkpoints)


def _failure(what: str, checkpoints: Checkpoints) -> BertjaxError:
    checkpoints.wait()
    last = checkpoints.latest_step()
    good = "none was saved yet" if last is None else f"the last good checkpoint is {checkpoints.path(last)}"
    return BertjaxError(f"{what}; {good}. Try a lower optimizer.learning_rate or a longer warm-up, in a new --workdir")
