"""Putting several sentence pairs into one row, so that rows are full."""

import numpy as np


def packed(lengths: np.ndarray, room: int, most: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Puts pairs into rows: the longest first, each into the row that it fills best (best-fit decreasing).

    Args:
      lengths: [pairs] int64, tokens of each with its special ones, 1 to `room`.
      room: tokens of a row.
      most: pairs a row.
      rng: decides which of the pairs of one length go together; only its `permutation` is used.

    Returns:
      int64 [pairs], the pairs row after row, and int64 [most], how many rows have one, two, ... pairs. Rows of fewer
      pairs come first, and those of equally many in the order of the first of their pairs.
    """
    shuffled = rng.permutation(lengths.size)
    # The longest first, those of one length in random order.
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(lengths.size, np.int64)
    # Numbers of the rows that take another pair, by the room that is left in them.
    open_rows: list[list[np.ndarray]] = [[] for _ in range(room + 1)]
    counts = np.zeros(lengths.size, np.int64)
    rows = 0
    bounds = np.flatnonzero(np.diff(lengths[order], prepend=room + 1, append=0))
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        length, waiting = int(lengths[order[start]]), order[start:stop]
        for left in range(length, room):
            while waiting.size and open_rows[left]:
                stack = open_rows[left].pop()
                taken, rest = stack[: waiting.size], stack[waiting.size :]
                if rest.size:
                    open_rows[left].append(rest)
                row_of[waiting[: taken.size]] = taken
                waiting = waiting[taken.size :]
                counts[taken] += 1
                still = taken[counts[taken] < most]
                if still.size and left > length:
                    open_rows[left - length].append(still)
            if not waiting.size:
                break
        if waiting.size:
            # Those that fit into no row open new ones, several of them in each where they are short.
            made = rows + np.arange(waiting.size) // min(room // length, most)
            row_of[waiting] = made
            filled = np.bincount(made - rows)
            counts[rows : rows + filled.size] = filled
            for number in np.unique(filled):
                left = room - number * length
                if number < most and left:
                    open_rows[left].append(rows + np.flatnonzero(filled == number))
            rows += filled.size
    first = np.full(rows, lengths.size, np.int64)
    np.minimum.at(first, row_of, np.arange(lengths.size))
    numbers = np.bincount(row_of, minlength=rows)
    place = np.empty(rows, np.int64)
    place[np.lexsort((first, numbers))] = np.arange(rows)
    return np.argsort(place[row_of], kind="stable"), np.bincount(numbers, minlength=most + 1)[1:]
