"""Training loop of all tasks: start from a checkpoint, logging, evaluation, checkpoints and profiling."""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh

from bertjax.errors import BertjaxError, DivergenceError, UsageError
from bertjax.model.models import EmbeddingModel
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import Checkpoints, restore_opt_state, saved_fingerprint, workdir_of
from bertjax.training.compatibility import check_vocabulary, has_output_layer_of, source_of
from bertjax.training.evaluation import evaluate
from bertjax.training.metrics import evaluation_metrics, import_tracker
from bertjax.training.multihost import raise_on_all_hosts
from bertjax.training.optimizer import Optimizer, describe_head_steps, make_optimizer, make_schedule
from bertjax.training.parameters import load_params
from bertjax.training.preemption import stop_requests, watchdog
from bertjax.training.profiling import StepProfiler
from bertjax.training.progress import Progress
from bertjax.training.results import EvaluationHistory, load_best, read_log, write_results
from bertjax.training.sharding import check_batch_sizes, data_shard, make_mesh, put_batch, replicated
from bertjax.training.step import TrainState, abstract_state, make_init_state, make_train_step, metric_means, random_key
from bertjax.training.workdir import open_workdir, saved_init_fingerprint

logger = logging.getLogger(__name__)

# Minimum first loss for the divergence check, because contrastive losses of a trained checkpoint start near 0.
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
      UsageError: the workdir belongs to another config or other data, the mesh does not fit the batch, or the
        evaluation data has no labels or no text.
      BertjaxError: the workdir is unusable, all checkpoints are damaged, or the loss diverges or is not finite.
    """
    config = task.config
    # Raise most errors here, before the workdir is created.
    if task.evaluation_problem:
        raise UsageError(task.evaluation_problem)
    for name in trackers:
        import_tracker(name)
    mesh = make_mesh(config.mesh)
    check_batch_sizes(task.batch_sizes, mesh, config.grad_accum_steps)
    check_batch_sizes((task.eval_batch_size,), mesh)
    optimizer = make_optimizer(config.optimizer)
    schedule = make_schedule(config.optimizer, task.warmup_steps, task.phase_schedule)
    head_steps = config.optimizer.head_steps  # first steps, which train only the parameters above the encoder

    def step_function(step: int) -> Callable[..., TrainState]:
        # `make_train_step` is cached. It builds a new function only for other RoPE thetas, and after the head steps.
        objective = task.objective_at(num_updates=step + 1)
        return make_train_step(objective, optimizer, mesh, config.grad_accum_steps, head_only=step < head_steps)

    step_function(0)  # Raises if the step cannot be built.
    state_shapes = abstract_state(task.objective, optimizer, mesh)
    if keep_optimizer and (task.reinit_params or head_steps):
        raise UsageError("--keep_optimizer needs a pre-training config without head_steps; omit --keep_optimizer")
    if init_from:
        check_vocabulary(task, init_from, task.objective.can_add_pieces)
    for note in (*task.notes, *describe_head_steps(config.optimizer)):
        logger.info(note)

    with contextlib.ExitStack() as stack:
        # Local workdirs are locked. For `gs://`, `check_still_owner` raises if another run has taken the workdir over.
        opened = stack.enter_context(open_workdir(task, path, init_from, state_shapes))
        workdir, checkpoints, check_still_owner = opened
        stop_requested = stack.enter_context(stop_requests())
        heartbeat = stack.enter_context(watchdog(config.hang_seconds))
        state = _restore_or_init(task, optimizer, mesh, workdir, checkpoints, state_shapes, init_from, keep_optimizer)
        step = int(state.step)  # number of updates so far, and index of the next step
        # Lines up to `step`. `Progress` deletes later ones, because the run logs these steps again.
        logged = read_log(task, workdir, step) if step else []
        evaluations = {line["step"]: metrics for line in logged if (metrics := evaluation_metrics(line))}
        history = EvaluationHistory(task.best_metric, config.patience, evaluations)
        progress = stack.enter_context(contextlib.closing(Progress(task, workdir, step, logged, trackers)))
        profiler = stack.enter_context(StepProfiler(workdir, profile_steps))
        # The schedule is a pytree of numbers, an argument of the step. `jit` replicates it on all devices. `device_put`
        # would first run a collective to compare the values of the hosts.
        dropout_key, device_schedule = jax.jit(
            lambda: (random_key(config.seed, "dropout"), jax.tree.map(jnp.asarray, schedule)),
            out_shardings=replicated(mesh),
        )()

        def save(state: TrainState, step: int) -> None:
            _check_steps_finite(state)
            with progress.paused():
                check_still_owner()
                metrics_sha256 = progress.flush()  # With this hash, `read_log` detects lost lines after a resume.
                # The score is None if this step was not evaluated, or if the task has no `best_metric`.
                checkpoints.save(state, history.score_at(step), metrics_sha256)
            heartbeat()

        def evaluate_if_due(state: TrainState, step: int) -> None:
            nonlocal history
            if not task.eval_every or history.metrics_at(step):
                return
            if step == task.total_steps or (step % task.eval_every == 0 and (step > 0 or task.eval_first)):
                history = history.add(step, _evaluate(task, mesh, state, step, progress, heartbeat))

        # Without scores, as in pre-training, save before an evaluation, because a preempted host may not have enough
        # time left to evaluate. With scores, evaluate before saving, because a checkpoint stores its score.
        saves_first = task.best_metric is None
        # With scores, do not evaluate a saved step, even if it is due now: its checkpoint cannot get a score later.
        if saves_first or step == 0:
            evaluate_if_due(state, step)

        # A run that was killed between early stopping and writing `results.json` must not train further.
        done = step >= task.total_steps or history.is_out_of_patience()
        stopped = False
        batches = task.train_batches(step, data_shard(mesh))
        while not (done or stopped):
            batch = put_batch(next(batches), mesh)
            if 0 < step == head_steps and config.optimizer.name != "bert_adam":
                # All parameters share a count of updates, for bias correction. It must start with the encoder's first.
                state = state.replace(opt_state=jax.tree.map(jnp.zeros_like, state.opt_state))
            with profiler.step(step):
                state = step_function(step)(state, batch, dropout_key, device_schedule)
            step += 1
            progress.step_done(step, state)
            profiler.step_done(step, state)
            heartbeat()
            if not saves_first:
                evaluate_if_due(state, step)
            done = step == task.total_steps or history.is_out_of_patience()
            # `stop_requested` takes the step, so that all hosts stop after the same step.
            stopped = not done and stop_requested(step)
            # Log before saving, because a checkpoint contains the metric sums, so a resumed run would log them again.
            if done or step % config.log_every == 0:
                state = _log_and_reset(task, state, step, progress)
            if done or stopped or step % task.checkpoint_every == 0 or history.is_best_at(step):
                save(state, step)
            if saves_first and not stopped:
                evaluate_if_due(state, step)

        checkpoints.wait()
        heartbeat()
        if stopped:
            logger.info(f"stopped by a signal; saved step {step:,}; run the same command to resume")
            return {"step": step, "stopped": True, **history.metrics_at(step)}
        _check_data_files(task, wait=True)
        heartbeat()
        checkpoint, params = load_best(workdir, checkpoints, state)
        if (score := history.score_at(int(checkpoint.name))) != history.best_score:
            missing = "the checkpoint with the best score is missing"
            logger.warning(f"{missing}, so results are from {checkpoint} (score {score})")
        progress.plot_curves()
        values = write_results(task, mesh, state, params, workdir, checkpoint, history, progress, heartbeat)
        progress.finish(step, checkpoint)
        return {"step": step, "stopped": False, "checkpoint": str(checkpoint), **values}


def _restore_or_init(
    task: Task,
    optimizer: Optimizer,
    mesh: Mesh,
    workdir: epath.Path,
    checkpoints: Checkpoints,
    state_shapes: TrainState,
    init_from: epath.Path | None,
    keep_optimizer: bool,
) -> TrainState:
    """Restores the newest checkpoint of the workdir, or initializes a new state if there are no checkpoints."""

    def init() -> TrainState:
        return make_init_state(task.objective, optimizer, mesh)(random_key(task.config.seed, "init"))

    state = checkpoints.restore_latest(state_shapes, init)
    if state is not None:
        ignored = "; --init_from is ignored" if init_from else ""
        if init_from and saved_fingerprint(init_from) != saved_init_fingerprint(workdir):
            if task.has_cached_features:
                problem = "started from different parameters than --init_from, so cached features would differ"
                raise UsageError(f"the run of {workdir} {problem}; use the original --init_from or another --workdir")
            ignored += ", and the run started from different parameters"
        logger.info(f"resumed {workdir} at step {int(state.step):,}{ignored}")
        return state
    state = init()
    if init_from is None:
        logger.info("starting at step 0 with random parameters, because --init_from is not set")
        return state
    reinit_params = () if has_output_layer_of(task, init_from) else task.reinit_params
    # With `keep_optimizer`, pieces cannot be added, because the saved optimizer state lacks their moments.
    new_pieces = check_vocabulary(task, init_from, task.objective.can_add_pieces and not keep_optimizer)
    state = state.with_initial_params(load_params(init_from, state.params, reinit_params, new_pieces))
    if keep_optimizer:
        state = state.replace(opt_state=restore_opt_state(init_from, state_shapes, task.config.optimizer.name))
    restored = "parameters and optimizer state" if keep_optimizer else "parameters"
    logger.info(f"starting at step 0 with the {restored} of {source_of(init_from)}")
    if (workdir_of(init_from) / "modules.json").exists() and not isinstance(task.objective.model, EmbeddingModel):
        logger.warning("dropped the sentence-transformers modules, because training changes the states that they pool")
    if new_pieces:
        count = len(new_pieces.parts)
        logger.info(f"initialized the embeddings of {count:,} new vocabulary pieces as means over their old pieces")
    return state


def _log_and_reset(task: Task, state: TrainState, step: int, progress: Progress) -> TrainState:
    """Logs and checks the metrics since the last logged step. Returns the state with its metric sums reset to 0."""
    _check_steps_finite(state)
    _check_data_files(task, wait=False)
    values = metric_means(state.sums, task.objective.loss_weights)
    progress.log_step(step, values)
    first_loss = progress.first_loss
    loss = values.get("loss", 0.0)  # There is no loss if all weights since the last logged step are 0.
    if loss > task.config.divergence_factor * max(first_loss, _MIN_FIRST_LOSS):
        raise DivergenceError(f"the loss diverged at step {step:,}: {loss:.4g} (first logged loss: {first_loss:.4g})")
    return state.replace(sums=jax.tree.map(jnp.zeros_like, state.sums))


def _evaluate(
    task: Task, mesh: Mesh, state: TrainState, step: int, progress: Progress, heartbeat: Callable[[], None]
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


def _check_data_files(task: Task, *, wait: bool) -> None:
    """Raises on all hosts if any host has found damaged data. With `wait`, verifies all data first."""
    with raise_on_all_hosts():
        try:
            task.check_data_files(wait)
        except BertjaxError as error:
            raise BertjaxError(f"{error}; checkpoints may be affected, so train in a new --workdir") from error
