"""Selection of the best checkpoint by an evaluation metric, and early stopping."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from bertjax.errors import UsageError

# Suffixes of metrics for which lower is better. They do not apply to `f1_TYPE`, whose entity type may be any word.
_LOWER_IS_BETTER = ("loss", "error", "entropy")
_SET_SUFFIXES = ("_matched", "_mismatched")


def lower_is_better(metric: str) -> bool:
    """Returns True for losses, errors and entropies."""
    for suffix in _SET_SUFFIXES:
        metric = metric.removesuffix(suffix)
    return metric.endswith(_LOWER_IS_BETTER) and not metric.startswith("f1_")


def score(metric: str, value: Any) -> float | None:
    """Returns a metric's value, negated if lower is better. Returns None if the value is not a number."""
    if not isinstance(value, (int, float)) or value != value:
        return None
    return -float(value) if lower_is_better(metric) else float(value)


def check_metric(select_by: str, metrics: Iterable[str]) -> None:
    """Raises a UsageError if `select_by` is not among the metrics of the evaluations."""
    known = sorted({*metrics})
    if select_by not in known:
        raise UsageError(f"unknown metric: config.select_by={select_by!r}; use one of {', '.join(known)}")


def is_out_of_patience(scores: Sequence[float | None], patience: int) -> bool:
    """Returns True if the last `patience` scores do not exceed the best earlier score. A patience of 0 is unlimited."""
    if not patience or len(scores) <= patience:
        return False
    numbers = [float("-inf") if value is None else value for value in scores]
    return max(numbers[-patience:]) <= max(numbers[:-patience])


@dataclasses.dataclass(frozen=True)
class EvaluationHistory:
    """Evaluations of a run in order, which determine the best checkpoint and early stopping.

    Attributes:
      metric: metric that selects the best checkpoint (default: "", no selection).
      patience: number of evaluations without improvement after which a run stops (default: 0, no limit).
      evaluations: step and metrics of each evaluation.
    """

    metric: str = ""
    patience: int = 0
    evaluations: tuple[tuple[int, dict[str, float]], ...] = ()

    def add(self, step: int, metrics: dict[str, float]) -> "EvaluationHistory":
        """Returns the history with another evaluation."""
        return dataclasses.replace(self, evaluations=(*self.evaluations, (step, metrics)))

    @property
    def first(self) -> dict[str, float]:
        """Metrics of the first evaluation, or {} without evaluations."""
        return self.evaluations[0][1] if self.evaluations else {}

    @property
    def last(self) -> dict[str, float]:
        """Metrics of the last evaluation, or {} without evaluations."""
        return self.evaluations[-1][1] if self.evaluations else {}

    def at(self, step: int) -> dict[str, float]:
        """Returns the metrics of the last evaluation at `step`, or {} without an evaluation."""
        return next((metrics for evaluated, metrics in reversed(self.evaluations) if evaluated == step), {})

    def score_at(self, step: int) -> float | None:
        """Returns the score of the last evaluation at `step` (higher is better), or None without an evaluation."""
        return score(self.metric, self.at(step).get(self.metric))

    def is_best_at(self, step: int) -> bool:
        """Returns whether the last evaluation is at `step` and better than all earlier evaluations."""
        if not self.evaluations or self.evaluations[-1][0] != step or self.score_at(step) is None:
            return False
        *earlier, last = self._scores()
        return all(value is None or value < last for value in earlier)

    def is_out_of_patience(self) -> bool:
        """Returns whether the run should stop early."""
        return is_out_of_patience(self._scores(), self.patience)

    def _scores(self) -> list[float | None]:
        return [score(self.metric, metrics.get(self.metric)) for _, metrics in self.evaluations]
