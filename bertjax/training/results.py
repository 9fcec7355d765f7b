"""The result of a finished run: `results.json`, and a table beside the baseline."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from etils import epath

from bertjax.errors import BertjaxError, first_line
from bertjax.metrics.report import ClassReport
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import CHECKPOINTS, saved_fingerprint
from bertjax.training.plots import plot_confusion
from bertjax.training.workdir import CONFUSION, RESULTS, saved_init_fingerprint
from bertjax.utils.io import read_json_object, write_atomic

logger = logging.getLogger(__name__)


def read_results(workdir: epath.Path, fields: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the `results.json` of a finished run; raises a BertjaxError if the file or one of `fields` is missing."""
    file = workdir / RESULTS
    try:
        results = read_json_object(file)
        if missing := [name for name in ("config", "data_sha256", *fields) if name not in results]:
            raise ValueError(f"it has no {missing[0]}")
        if not {"task", "data", "model"} <= results["config"].keys():
            raise ValueError("its config has no task, data or model")
        return results
    except (OSError, ValueError, AttributeError) as error:
        raise BertjaxError(
            f"cannot read {file}: {first_line(error)}; remove it and repeat the command that trained"
        ) from error


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
      reports: its class reports, by the suffix of the evaluation set.
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
    write_atomic(workdir / RESULTS, json.dumps(results, indent=1) + "\n")
    with_confusion = {suffix: report for suffix, report in reports.items() if report.confusion is not None}
    if with_confusion:
        plot_confusion(with_confusion, workdir / CONFUSION)
    return baseline


def log_results(values: dict[str, float], before: dict[str, float], baseline: dict[str, float]) -> None:
    """Logs a table of the metrics on held-out data.

    Args:
      values: metrics of the best checkpoint.
      before: metrics before the first step ({}: not evaluated).
      baseline: metrics of the best guess that does not look at the input.
    """
    if not values:
        return
    width = 2 + max(map(len, [*values, "held out"]))
    logger.info(f"{'held out':<{width}}{'before' if before else '':>12}{'after':>12}{'baseline':>12}")
    for name, value in values.items():
        if name != "loss":
            columns = [f"{source[name]:.4f}" if name in source else "" for source in (before, {name: value}, baseline)]
            logger.info(f"{name:<{width}}" + "".join(f"{column:>12}" for column in columns))


def log_reports(reports: dict[str, ClassReport]) -> None:
    """Logs precision and recall of each class."""
    for suffix, report in reports.items():
        logger.info(f"by class{suffix.replace('_', ' ')}:\n{report.format()}")
