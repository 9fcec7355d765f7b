"""Rows of a global batch that one process produces. `training/sharding.py` derives these rows from the device mesh."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class DataShard:
    """Share of every global batch that one process produces.

    A global batch is divided into `count` equal parts of consecutive rows. `parts` are the indices of this process's
    parts, ascending. With tensor parallelism, several processes may produce the same part.
    """

    parts: tuple[int, ...]
    count: int

    def rows(self, batch_size: int) -> np.ndarray:
        """Returns the indices of this process's rows in a global batch, int64, ascending."""
        return np.arange(batch_size).reshape(self.count, -1)[list(self.parts)].ravel()


SINGLE_SHARD = DataShard((0,), 1)
