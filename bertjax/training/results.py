"""Evaluations of a run, which select its best checkpoint, and the results of a finished run in `results.json`."""

import dataclasses
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh

from bertjax.errors import BertjaxError, first_line
from bertjax.metrics.metric import Metric
from bertjax.metrics.report import ClassReport, log_reports
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import CHECKPOINTS, saved_fingerprint
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.evaluation import evaluate_batches
from bertjax.training.metrics import METRICS, evaluation_metrics, have_hash, json_number, read_lines
from bertjax.training.parameters import load_params
from bertjax.training.plots import plot_confusion
from bertjax.training.progress import Progress
from bertjax.training.step import TrainState
from bertjax.training.workdir import CONFUSION, RESULTS, saved_init_fingerprint
from bertjax.utils.io import read_json_object
from bertjax.utils.json_files import write_json

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EvaluationHistory:
    """Evaluations of a run in order. They determine the best checkpoint and early stopping.

    Attributes:
      metric: metric that selects the best checkpoint (default: None, no selection).
      patience: number of evaluations without improvement after which a run stops (default: 0, no limit).
      evaluations: metrics of each evaluation by step, as in `metrics.jsonl`: NaN and infinity are strings.
    """

    metric: Metric | None = None
    patience: int = 0
    evaluations: Mapping[int, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def add(self, step: int, metrics: dict[str, float]) -> "EvaluationHistory":
        """Returns the history with an evaluation appended."""
        values = {name: json_number(value) for name, value in metrics.items()}
        return dataclasses.replace(self, evaluations={**self.evaluations, step: values})

    def at(self, step: int) -> dict[str, Any]:
        """Returns the metrics of the evaluation at `step`, or {} if `step` was not evaluated."""
        return self.evaluations.get(step, {})

    def score_at(self, step: int) -> float | None:
        """Returns the score of the evaluation at `step` (higher is better), or None without a score."""
        return self.metric.score(self.at(step).get(self.metric.name)) if self.metric else None

    @property
    def best_score(self) -> float | None:
        """Highest score of all evaluations after the first step, or None without scores."""
        scores = (self.score_at(step) for step in self.evaluations if step)
        return max((score for score in scores if score is not None), default=None)

    def is_best_at(self, step: int) -> bool:
        """Returns True if the evaluation at `step` is better than all others after the first step.

        Step 0 does not count, because it has no checkpoint.
        """
        scores = self._scores()
        best = scores.pop(step, -math.inf)
        return best > max((score for other, score in scores.items() if other), default=-math.inf)

    def is_out_of_patience(self) -> bool:
        """Returns True if the last `patience` evaluations did not improve on the best earlier score, also at step 0."""
        scores, patience = [*self._scores().values()], self.patience
        return 0 < patience < len(scores) and max(scores[-patience:]) <= max(scores[:-patience])

    def _scores(self) -> dict[int, float]:
        """Returns the score of each evaluation by step, or minus infinity if it has no score."""
        scores = {step: self.score_at(step) for step in self.evaluations}
        return {step: -math.inf if score is None else score for step, score in scores.items()}


def read_log(task: Task, workdir: epath.Path, step: int) -> list[dict[str, Any]]:
    """Returns the records of `metrics.jsonl` up to `step`, the step of the checkpoint that a run resumes.

    All lines that existed when the checkpoint was saved must be there. Later ones, such as the evaluation of this step,
    may follow. Otherwise, raises a BertjaxError if scores select the best checkpoint, else logs a warning.
    """
    file = workdir / METRICS
    lines = [line for line in read_lines(file) if line["step"] <= step]
    sha256 = read_metadata(workdir / CHECKPOINTS / str(step)).metrics_sha256
    if sha256 and not have_hash(lines, sha256):
        problem = f"{file} lacks lines that the run had logged before checkpoint {step}, or has others"
        if task.best_metric:
            fix = "restore the file, or choose another --workdir"
            raise BertjaxError(f"{problem}, so the best checkpoint is unknown; {fix}")
        logger.warning(f"{problem}; curves and numbers of tokens seen will be wrong")
    return lines


def evaluation_history(task: Task, lines: Sequence[dict[str, Any]]) -> EvaluationHistory:
    """Returns the history of the evaluations in `lines`, which are records of `metrics.jsonl`."""
    evaluations = {line["step"]: metrics for line in lines if (metrics := evaluation_metrics(line))}
    return EvaluationHistory(task.best_metric, task.config.patience, evaluations)


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
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BertjaxError(
            f"cannot read {file}: {first_line(error)}; remove it and train again with the same command"
        ) from error


def finish_run(
    task: Task,
    mesh: Mesh,
    state: TrainState,
    workdir: epath.Path,
    best: epath.Path,
    history: EvaluationHistory,
    progress: Progress,
    heartbeat: Callable[[], None],
) -> dict[str, Any]:
    """Writes and logs the results of the best checkpoint, and returns its metrics. `state` is the last state."""
    values = history.at(int(best.name))
    metric = task.best_metric
    reports: dict[str, ClassReport] = {}
    if task.labels and task.eval_every:
        params = state.eval_params if int(best.name) == int(state.step) else load_params(best, state.eval_params)
        reports = task.class_reports(evaluate_batches(task, mesh, params, heartbeat)[1])
    if jax.process_index() != 0:
        return values
    results = {
        "step": int(best.name),
        "seed": task.config.seed,
        "selected_by": metric.name if metric else "",
        "lower_is_better": metric is not None and metric.lower_is_better,
        **values,
        "baseline": progress.baseline,
        "last_step": int(state.step),
        "checkpoint": f"{CHECKPOINTS}/{best.name}",
        "parameters_fingerprint": saved_fingerprint(best),
        "started_from": saved_init_fingerprint(workdir),
        "data_sha256": task.data_hash,
        # The keys of `reports` are the metric-name suffixes of the evaluation sets, such as `_mismatched`.
        **{f"{name}{suffix}": part for suffix, report in reports.items() for name, part in report.as_json().items()},
        **task.results,
        "config": dataclasses.asdict(task.config),
    }
    if any(report.confusion is not None for report in reports.values()):
        score = f", {metric.name} {float(values[metric.name]):.4g}" if metric and metric.name in values else ""
        files = re.sub(r"[^\s,]*/", "", task.results["evaluated_on"])
        plot_confusion(reports, workdir / CONFUSION, f"{task.config.task}, {files}{score}")
    # Write this file last, because it marks the run as finished. A run that is killed before this line writes all
    # files again when it resumes.
    write_json(workdir / RESULTS, results)
    log_results(values, history.at(0), progress.baseline)
    log_reports(reports)
    return values


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
