"""Overlapping parts of a long text: in which of them a position is told best."""

from collections.abc import Sequence

import numpy as np


def most_context(parts: Sequence[tuple[int, int]], count: int, bonus: float = 0.0) -> np.ndarray:
    """Which part has the most context for each of `count` positions: int64 [count], the first of several.

    Args:
      parts: first position and the one after the last; together they hold all.
      bonus: context that a part's positions get for each position it has; 0.01 in `_check_is_max_context` of
        google-research/bert's `run_squad.py`.
    """
    best, winner = np.full(count, -np.inf), np.zeros(count, np.int64)
    for index, (first, last) in enumerate(parts):
        here = np.arange(first, last)
        context = np.minimum(here - first, last - 1 - here) + bonus * (last - first)
        better = context > best[first:last]
        winner[here[better]], best[here[better]] = index, context[better]
    return winner
