"""By which metric of the dev set a run selects its checkpoint, and when it has waited long enough for a better one."""

from collections.abc import Iterable, Sequence
from typing import Any

from bertjax.errors import UsageError

# How the names of metrics end of which less is better, but for the suffix of a second evaluation set. An entity type
# or class is never at the end alone: its F1 is `f1_TYPE`.
_ERRORS = ("loss", "error", "entropy")
_SUFFIXES = ("_matched", "_mismatched")


def is_error(metric: str) -> bool:
    """Whether less of a metric is better: of losses, errors and entropies, by their names; of all others, more is."""
    for suffix in _SUFFIXES:
        metric = metric.removesuffix(suffix)
    return metric.endswith(_ERRORS) and not metric.startswith("f1_")


def score(metric: str, value: Any) -> float | None:
    """A metric's value as a number of which more is better; None where it is none, or not a number."""
    if not isinstance(value, (int, float)) or value != value:
        return None
    return -float(value) if is_error(metric) else float(value)


def check_metric(select_by: str, metrics: Iterable[str]) -> None:
    """Refuses to select by what no evaluation gives.

    Raises:
      UsageError: lists the metrics there are.
    """
    known = sorted({*metrics})
    if select_by not in known:
        raise UsageError(f"config.select_by is {select_by!r}; the metrics of this task are {', '.join(known)}")


def is_out_of_patience(scores: Sequence[float | None], patience: int) -> bool:
    """Whether the last `patience` of a run's evaluations are no better than the best one before them; 0 is never."""
    if not patience or len(scores) <= patience:
        return False
    numbers = [float("-inf") if value is None else value for value in scores]
    return max(numbers[-patience:]) <= max(numbers[:-patience])
