"""Selection of the best checkpoint by an evaluation metric, and early stopping."""

from collections.abc import Iterable, Sequence
from typing import Any

from bertjax.errors import UsageError

# Suffixes of metrics for which lower is better. Exclude `f1_TYPE`, since the entity type may end with such a word.
_LOWER_IS_BETTER = ("loss", "error", "entropy")
_SET_SUFFIXES = ("_matched", "_mismatched")


def lower_is_better(metric: str) -> bool:
    """Returns True for losses, errors and entropies."""
    for suffix in _SET_SUFFIXES:
        metric = metric.removesuffix(suffix)
    return metric.endswith(_LOWER_IS_BETTER) and not metric.startswith("f1_")


def score(metric: str, value: Any) -> float | None:
    """Returns the value, negated if lower is better, or None if the value is not a number."""
    if not isinstance(value, (int, float)) or value != value:
        return None
    return -float(value) if lower_is_better(metric) else float(value)


def check_metric(select_by: str, metrics: Iterable[str]) -> None:
    """Raises a UsageError if `select_by` is not among the metrics of the evaluations."""
    known = sorted({*metrics})
    if select_by not in known:
        raise UsageError(f"unknown metric: config.select_by={select_by!r}; use one of {', '.join(known)}")


def is_out_of_patience(scores: Sequence[float | None], patience: int) -> bool:
    """Returns True if none of the last `patience` scores exceeds the best earlier score (`patience` 0: never)."""
    if not patience or len(scores) <= patience:
        return False
    numbers = [float("-inf") if value is None else value for value in scores]
    return max(numbers[-patience:]) <= max(numbers[:-patience])
