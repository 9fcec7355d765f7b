"""Mining of hard negatives: documents near an anchor that are not its positives."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from bertjax.metrics.nearest import nearest, unit_rows
from bertjax.utils.terminal import progress_bar

_ANCHORS_PER_BLOCK = 1024


def hard_negatives(
    anchors: np.ndarray,
    documents: np.ndarray,
    positives: Sequence[Sequence[int]],
    count: int,
    first_rank: int,
    last_rank: int,
    margin: float = -math.inf,
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields, for each anchor, indices and cosines of its negatives, nearest first, and the cosines of its positives.

    Args:
      anchors: float32 [A, D].
      documents: float32 [N, D], vectors of distinct texts.
      positives: for each anchor, the indices of its positives in `documents`.
      count: maximum number of negatives.
      first_rank, last_rank: ranks of negatives. Rank 1 is the nearest document that is not a positive of the anchor.
      margin: minimum difference between the cosine of the anchor's least similar positive and a negative's cosine.
    """
    anchors, documents = unit_rows(anchors), unit_rows(documents)
    with progress_bar("mine", len(anchors), " anchors") as bar:
        for start in range(0, len(anchors), _ANCHORS_PER_BLOCK):
            block = slice(start, start + _ANCHORS_PER_BLOCK)
            depth = last_rank + max(map(len, positives[block]))
            # Round `depth` up to a power of two, because the search is compiled for each distinct depth.
            found = nearest(anchors[block], documents, 1 << (depth - 1).bit_length(), progress=False)
            for vector, positive, cosines, indices in zip(anchors[block], positives[block], *found, strict=True):
                positive_cosines = documents[positive] @ vector
                ranked = np.flatnonzero(~np.isin(indices, positive))[first_rank - 1 : last_rank]
                chosen = ranked[cosines[ranked] + margin <= positive_cosines.min()][:count]
                yield indices[chosen], cosines[chosen], positive_cosines
                bar.update()
