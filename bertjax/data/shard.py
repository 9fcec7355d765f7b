"""Which rows of a global batch one process makes: the mesh decides (`training/sharding.py`), not its number."""

import dataclasses

import numpy as np

from bertjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class DataShard:
    """Some of the equal, contiguous parts that every global batch is cut into.

    Processes whose devices hold the same part, as those of one tensor-parallel group do, both have it in their share,
    and make the same rows of it.

    Attributes:
      parts: those of this process, ascending.
      count: of all parts.
    """

    parts: tuple[int, ...]
    count: int

    def runs(self, batch_size: int) -> list[tuple[int, int]]:
        """First row and the one after the last of each stretch of rows without a gap, ascending.

        Raises:
          UsageError: the batch cannot be cut into so many equal parts.
        """
        if batch_size % self.count:
            raise UsageError(
                f"batch_size {batch_size} cannot be split into {self.count} parts; make it a multiple of {self.count}"
            )
        rows = batch_size // self.count
        found: list[tuple[int, int]] = []
        for part in self.parts:
            start, stop = part * rows, (part + 1) * rows
            if found and found[-1][1] == start:
                start, _ = found.pop()
            found.append((start, stop))
        return found

    def rows(self, batch_size: int) -> np.ndarray:
        """int64 [rows of this process], ascending.

        Raises:
          UsageError: as `runs`.
        """
        return np.concatenate([np.arange(start, stop) for start, stop in self.runs(batch_size)])


SINGLE_SHARD = DataShard((0,), 1)
