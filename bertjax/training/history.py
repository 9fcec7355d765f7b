"""Evaluations of a run so far, which select its best checkpoint and decide on early stopping."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from bertjax.errors import BertjaxError
from bertjax.metrics.metric import Metric
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import CHECKPOINTS
from bertjax.training.checkpoint_metadata import read_metadata
from bertjax.training.metrics import METRICS, evaluation_metrics, have_hash, json_number, read_lines

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
        """Returns True if the evaluation at `step` is better than all others.

        An evaluation at step 0 is not compared, because this step has no checkpoint.
        """
        if step not in self.evaluations:
            return False
        scores = self._scores()
        best = scores.pop(step)
        return best > max((score for other, score in scores.items() if other), default=-math.inf)

    def is_out_of_patience(self) -> bool:
        """Returns True if the last `patience` evaluations did not improve on the best earlier score. Step 0 counts."""
        if self.metric is None or not 0 < self.patience < len(self.evaluations):
            return False
        scores = [*self._scores().values()]
        return max(scores[-self.patience :]) <= max(scores[: -self.patience])

    def _scores(self) -> dict[int, float]:
        """Returns the score of each evaluation by step, or minus infinity if it has no score."""
        scores = {step: self.score_at(step) for step in self.evaluations}
        return {step: -math.inf if score is None else score for step, score in scores.items()}


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


def evaluation_history(task: Task, lines: Sequence[dict[str, Any]]) -> EvaluationHistory:
    """Returns the history of the evaluations in `lines`, which are records of `metrics.jsonl`."""
    evaluations = {line["step"]: metrics for line in lines if (metrics := evaluation_metrics(line))}
    return EvaluationHistory(task.best_metric, task.config.patience, evaluations)
