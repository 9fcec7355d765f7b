"""Packing of several sentence pairs into a row."""

import numpy as np


def pack_rows(
    lengths: np.ndarray, seq_len: int, max_pairs: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Packs pairs into rows by best-fit decreasing: longest first, each into the fullest row with seq_len for it.

    Args:
      lengths: tokens of each pair with its special tokens, 1 to `seq_len`, int64 [pairs].
      seq_len: tokens per row.
      max_pairs: maximum pairs of a row.
      rng: random generator that orders pairs of equal length; only its `permutation` is used.

    Returns:
      The pairs in the order of their rows, int64 [pairs], and the number of rows with 1, 2, ... pairs, int64
      [max_pairs]. Rows are sorted by their number of pairs, then by their first pair.
    """
    shuffled = rng.permutation(lengths.size)
    # Longest first, pairs of equal length in random order.
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(lengths.size, np.int64)
    # Rows that can take another pair, by their remaining tokens.
    open_rows: list[list[np.ndarray]] = [[] for _ in range(seq_len + 1)]
    counts = np.zeros(lengths.size, np.int64)
    rows = 0
    bounds = np.flatnonzero(np.diff(lengths[order], prepend=seq_len + 1, append=0))
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        length, waiting = int(lengths[order[start]]), order[start:stop]
        for left in range(length, seq_len):
            while waiting.size and open_rows[left]:
                stack = open_rows[left].pop()
                taken, rest = stack[: waiting.size], stack[waiting.size :]
                if rest.size:
                    open_rows[left].append(rest)
                row_of[waiting[: taken.size]] = taken
                waiting = waiting[taken.size :]
                counts[taken] += 1
                unfilled = taken[counts[taken] < max_pairs]
                if unfilled.size and left > length:
                    open_rows[left - length].append(unfilled)
            if not waiting.size:
                break
        if waiting.size:
            # The remaining pairs open new rows, with several short ones in each.
            new_rows = rows + np.arange(waiting.size) // min(seq_len // length, max_pairs)
            row_of[waiting] = new_rows
            filled = np.bincount(new_rows - rows)
            counts[rows : rows + filled.size] = filled
            for number in np.unique(filled):
                left = seq_len - number * length
                if number < max_pairs and left:
                    open_rows[left].append(rows + np.flatnonzero(filled == number))
            rows += filled.size
    first = np.full(rows, lengths.size, np.int64)
    np.minimum.at(first, row_of, np.arange(lengths.size))
    numbers = np.bincount(row_of, minlength=rows)
    position = np.empty(rows, np.int64)
    position[np.lexsort((first, numbers))] = np.arange(rows)
    return np.argsort(position[row_of], kind="stable"), np.bincount(numbers, minlength=max_pairs + 1)[1:]
