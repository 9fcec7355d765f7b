"""Evaluations of a run, which select its best checkpoint and end it early, and its results in `results.json`."""

import dataclasses
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from bertjax.errors import BertjaxError, first_line
from bertjax.metrics.metric import Metric
from bertjax.metrics.report import ClassReport, log_reports
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import CHECKPOINTS, Checkpoints, find_checkpoint, saved_fingerprint
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.evaluation import evaluate_batches
from bertjax.training.metrics import METRICS, have_hash, json_number, read_lines
from bertjax.training.parameters import load_params
from bertjax.training.plots import plot_confusion
from bertjax.training.preemption import Heartbeat
from bertjax.training.progress import Progress
from bertjax.training.step import TrainState
from bertjax.training.workdir import CONFUSION, RESULTS, saved_init_fingerprint
from bertjax.utils.io import read_json_object
from bertjax.utils.json_files import write_json

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EvaluationHistory:
    """Evaluations of a run in order. They determine the best checkpoint and early stopping."""

    metric: Metric | None  # metric that selects the best checkpoint (None: no selection)
    patience: int  # number of evaluations without improvement after which a run stops (0: no limit)
    # Metrics of each evaluation by step, as in `metrics.jsonl`: NaN and infinity are strings.
    evaluations: Mapping[int, dict[str, Any]]

    def add(self, step: int, metrics: dict[str, float]) -> "EvaluationHistory":
        """Returns the history with an evaluation appended."""
        values = {name: json_number(value) for name, value in metrics.items()}
        return dataclasses.replace(self, evaluations={**self.evaluations, step: values})

    def metrics_at(self, step: int) -> dict[str, Any]:
        """Returns the metrics of the evaluation at `step`, or {} if `step` was not evaluated."""
        return self.evaluations.get(step, {})

    def score_at(self, step: int) -> float | None:
        """Returns the score of the evaluation at `step` (higher is better), or None without a score."""
        return self.metric.score(self.metrics_at(step).get(self.metric.name)) if self.metric else None

    @property
    def best_score(self) -> float | None:
        """Highest score of all evaluations except that of step 0, or None without scores."""
        scores = (self.score_at(step) for step in self.evaluations if step)
        return max((score for score in scores if score is not None), default=None)

    def is_best_at(self, step: int) -> bool:
        """Returns True if the evaluation at `step` is better than all others, except that of step 0."""
        score = self.score_at(step)
        others = (self.score_at(other) for other in self.evaluations if other not in (0, step))
        return score is not None and all(other is None or score > other for other in others)

    def is_out_of_patience(self) -> bool:
        """Returns True if none of the last `patience` evaluations is better than all before them, including step 0."""
        if self.metric is None or not 0 < self.patience < len(self.evaluations):
            return False
        scores = [-math.inf if (score := self.score_at(step)) is None else score for step in self.evaluations]
        return max(scores[-self.patience :]) <= max(scores[: -self.patience])


def read_log(task: Task, workdir: epath.Path, step: int) -> list[dict[str, Any]]:
    """Returns the records of `metrics.jsonl` up to `step`, the step of the checkpoint that a run resumes.

    The file must start with all lines that it had when the checkpoint was saved. Later lines, such as the evaluation of
    this step, may follow. If lines are missing or differ, raises a BertjaxError if scores select the best checkpoint,
    else logs a warning.
    """
    file = workdir / METRICS
    lines = [line for line in read_lines(file) if line["step"] <= step]
    sha256 = read_metadata(workdir / CHECKPOINTS / str(step)).metrics_sha256
    if sha256 and not have_hash(lines, sha256):
        problem = f"{file} lacks lines that the run had logged before checkpoint {step}, or has other lines"
        if task.best_metric:
            fix = "restore the file, or choose another --workdir"
            raise BertjaxError(f"{problem}, so the best checkpoint is unknown; {fix}")
        logger.warning(f"{problem}; curves and numbers of tokens seen will be wrong")
    return lines


def read_results(workdir: epath.Path, fields: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the `results.json` of a finished run. Raises a BertjaxError if it is damaged or lacks a field."""
    file = workdir / RESULTS
    try:
        results = read_json_object(file)
        for name in ("data_sha256", *fields):
            results[name]
        if "selected_by" in fields:
            results[results["selected_by"]]
        if not {"task", "data", "model"} <= results["config"].keys():
            raise KeyError("config")
        return results
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BertjaxError(f"cannot read {file}: {first_line(error)}; remove it and train again") from error


def _load_best(
    workdir: epath.Path, checkpoints: Checkpoints, state: TrainState, history: EvaluationHistory
) -> tuple[epath.Path, Any]:
    """Returns the checkpoint with the highest score (if none has a score, the newest checkpoint) and its parameters.

    Moves damaged checkpoints aside, and warns if the checkpoint with the highest score of `history` is missing. `state`
    is the last train state; its checkpoint must already be saved.
    """
    checkpoint = find_checkpoint(workdir)
    is_last = int(checkpoint.name) == int(state.step)
    try:
        params = state.eval_params if is_last else load_params(checkpoint, state.eval_params)
    except BertjaxError as error:
        checkpoints.move_aside(int(checkpoint.name), error)
        return _load_best(workdir, checkpoints, state, history)
    score = history.score_at(int(checkpoint.name))
    if score != history.best_score:  # Without scores, both are None.
        missing = "the checkpoint with the best score is missing"
        logger.warning(f"{missing}, so results are from {checkpoint} (score {score})")
    return checkpoint, params


def write_results(
    task: Task,
    mesh: Mesh,
    state: TrainState,
    workdir: epath.Path,
    checkpoints: Checkpoints,
    history: EvaluationHistory,
    progress: Progress,
    heartbeat: Heartbeat,
) -> tuple[epath.Path, dict[str, float]]:
    """Writes and logs the results of the best checkpoint, see `_load_best`. Returns the checkpoint and its metrics."""
    checkpoint, params = _load_best(workdir, checkpoints, state, history)
    values = history.metrics_at(int(checkpoint.name))
    metric = task.best_metric
    reports: dict[str, ClassReport] = {}
    if task.labels and task.eval_every:
        reports = task.class_reports(evaluate_batches(task, mesh, params, heartbeat)[1])
    if jax.process_index() != 0:
        return checkpoint, values
    heartbeat(math.inf)  # Suspend the watchdog: the baseline may read the whole corpus.
    results = {
        "step": int(checkpoint.name),
        "seed": task.config.seed,
        "selected_by": metric.name if metric else "",
        "lower_is_better": metric is not None and metric.lower_is_better,
        **values,
        "baseline": progress.baseline,
        "last_step": int(state.step),
        "checkpoint": f"{CHECKPOINTS}/{checkpoint.name}",
        "parameters_fingerprint": saved_fingerprint(checkpoint),
        "started_from": saved_init_fingerprint(workdir),
        "data_sha256": task.data_hash,
        **{f"{name}{suffix}": part for suffix, report in reports.items() for name, part in report.as_json().items()},
        **task.results,
        "config": dataclasses.asdict(task.config),
    }
    if any(report.confusion is not None for report in reports.values()):
        score = f", {metric.name} {float(values[metric.name]):.4g}" if metric and metric.name in values else ""
        files = re.sub(r"[^\s,]*/", "", task.results["evaluated_on"])
        plot_confusion(reports, workdir / CONFUSION, f"{task.config.task}, {files}{score}")
    # Write this file last, because it marks the run as finished. Until then, a resumed run writes all files again.
    write_json(workdir / RESULTS, results)
    log_results(values, history.metrics_at(0), progress.baseline)
    log_reports(reports)
    return checkpoint, values


def log_results(values: dict[str, Any], before: dict[str, Any], baseline: dict[str, float]) -> None:
    """Logs a table of the metrics before training (if evaluated), of the best checkpoint, and of the baseline."""
    if not values:
        return
    width = 2 + max(map(len, [*values, "held out"]))
    logger.info(
        f"{'held out':<{width}}{'before' if before else '':>12}{'after' if before else 'value':>12}{'baseline':>12}"
    )
    for name in values:
        sources = (before, values, baseline)
        columns = [f"{float(source[name]):.4f}" if name in source else "" for source in sources]
        logger.info(f"{name:<{width}}" + "".join(f"{column:>12}" for column in columns))
