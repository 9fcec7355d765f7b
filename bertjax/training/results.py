"""Result of a finished run: `results.json`, and a table of metrics with the baseline."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from bertjax.errors import BertjaxError, first_line
from bertjax.metrics.report import ClassReport, log_reports
from bertjax.metrics.selection import EvaluationHistory
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import CHECKPOINTS, saved_fingerprint
from bertjax.training.evaluation import predict
from bertjax.training.metrics import METRICS
from bertjax.training.parameters import load_params
from bertjax.training.plots import plot_confusion
from bertjax.training.state import TrainState
from bertjax.training.workdir import CONFUSION, RESULTS, saved_init_fingerprint
from bertjax.utils.io import read_json_object, write_atomic

logger = logging.getLogger(__name__)


def read_results(workdir: epath.Path, fields: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the `results.json` of a finished run. Raises a BertjaxError if it is missing or lacks a field."""
    file = workdir / RESULTS
    try:
        results = read_json_object(file)
        if missing := [name for name in ("config", "data_sha256", *fields) if name not in results]:
            raise ValueError(f"it lacks {missing[0]}")
        if not {"task", "data", "model"} <= results["config"].keys():
            raise ValueError("its config lacks task, data or model")
        return results
    except (OSError, ValueError, AttributeError) as error:
        raise BertjaxError(
            f"cannot read {file}: {first_line(error)}; remove it and train again with the same command"
        ) from error


def finish_run(
    task: Task, mesh: Mesh, state: TrainState, workdir: epath.Path, best: epath.Path, history: EvaluationHistory
) -> dict[str, float]:
    """Writes and logs the result of the best checkpoint, and returns its metrics.

    Args:
      task: task of the run.
      mesh: device mesh of the state.
      state: last state.
      workdir: workdir of the run.
      best: the best checkpoint.
      history: all evaluations of the run.
    """
    best_step = int(best.name)
    values = history.at(best_step)
    if not values and history.last:
        values = history.last
        logger.info(f"{workdir / METRICS} lacks the evaluation of step {best_step:,}; using the last evaluation")
    reports = _class_reports(task, mesh, best, state)
    if jax.process_index() == 0:
        baseline = write_results(workdir, task, best, int(state.step), values, reports)
        log_results(values, history.first if task.eval_first else {}, baseline)
        log_reports(reports)
    return values


def write_results(
    workdir: epath.Path,
    task: Task,
    checkpoint: epath.Path,
    last_step: int,
    values: dict[str, float],
    reports: dict[str, ClassReport],
) -> dict[str, float]:
    """Writes `results.json` and the confusion matrices, and returns the baseline.

    Args:
      workdir: workdir of the run.
      task: task of the run.
      checkpoint: the best checkpoint.
      last_step: last trained step.
      values: metrics of the best checkpoint.
      reports: class reports of the best checkpoint, by suffix of the evaluation set, such as `_mismatched`.
    """
    baseline = task.baseline() if task.eval_every else {}
    results = {
        "step": int(checkpoint.name),
        "seed": task.config.seed,
        "selected_by": task.best_metric,
        **values,
        "baseline": baseline,
        "last_step": last_step,
        "checkpoint": f"{CHECKPOINTS}/{checkpoint.name}",
        "parameters_fingerprint": saved_fingerprint(checkpoint),
        "started_from": saved_init_fingerprint(workdir),
        "data_sha256": task.data_hash,
        **{f"{name}{suffix}": part for suffix, report in reports.items() for name, part in report.as_json().items()},
        **task.results,
        "config": dataclasses.asdict(task.config),
    }
    with_confusion = {suffix: report for suffix, report in reports.items() if report.confusion is not None}
    if with_confusion:
        score = f", {task.best_metric} {values[task.best_metric]:.4g}" if task.best_metric in values else ""
        title = f"{task.config.task}, {task.results['evaluated_on']}{score}"
        plot_confusion(with_confusion, workdir / CONFUSION, title)
    # Write this file last, because it marks the run as finished. A run killed earlier writes all files again.
    write_atomic(workdir / RESULTS, json.dumps(results, indent=1) + "\n")
    return baseline


def log_results(values: dict[str, float], before: dict[str, float], baseline: dict[str, float]) -> None:
    """Logs a table of the metrics on held-out data.

    Args:
      values: metrics of the best checkpoint.
      before: metrics before the first step, empty if they were not evaluated.
      baseline: metrics of the best input-independent prediction.
    """
    if not values:
        return
    width = 2 + max(map(len, [*values, "held out"]))
    logger.info(f"{'held out':<{width}}{'before' if before else '':>12}{'after':>12}{'baseline':>12}")
    for name, value in values.items():
        if name != "loss":
            columns = [f"{source[name]:.4f}" if name in source else "" for source in (before, {name: value}, baseline)]
            logger.info(f"{name:<{width}}" + "".join(f"{column:>12}" for column in columns))


def _class_reports(task: Task, mesh: Mesh, best: epath.Path, state: TrainState) -> dict[str, ClassReport]:
    """Returns the class reports of the best checkpoint."""
    if not task.has_class_reports or not task.eval_every:
        return {}
    params = state.params
    if int(best.name) != int(state.step):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        params = load_params(best, shapes)
    return task.class_reports(predict(task, mesh, params)[1])
