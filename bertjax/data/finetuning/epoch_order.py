"""Assignment of examples to training steps, a pure function of seed and step."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from bertjax.data.finetuning.examples import Batching, Examples, make_batch
from bertjax.data.finetuning.packed_rows import NO_EXAMPLE, make_packed_batch, pack_rows
from bertjax.data.shard import DataShard

_GROUP_TOKENS = 32


class EpochOrder:
    """Random order of batches in which each epoch contains every example once.

    The examples of an epoch are shuffled, then sorted by length group (length in units of 32 tokens) and cut into
    batches. Finally, the batches are shuffled. One batch may be smaller than the others.
    """

    def __init__(self, examples: Examples, batching: Batching, seed: int) -> None:
        self._lengths, self._batching, self._seed = examples.lengths, batching, seed
        # Length groups do not depend on `bucket` and `examples_per_row`, so these settings do not change the order.
        self._groups = -(-self._lengths // _GROUP_TOKENS)
        self.steps_per_epoch = -(-len(examples) // batching.batch_size)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self._epoch_shapes = lru_cache(maxsize=None)(self._count_shapes)
        # Every epoch cuts the same sequence of length groups into batches. Hence all epochs have the same batch shapes
        # if `bucket` is a multiple of the group size.
        self._has_equal_epochs = batching.examples_per_row == 1 and batching.bucket % _GROUP_TOKENS == 0

    def _draw_epoch(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns the example indices of each batch, and the batches' shapes (rows, tokens) as int64 [steps, 2]."""
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._lengths))
        order = order[np.argsort(self._groups[order], kind="stable")]
        size = self._batching.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        batches = [batches[index] for index in rng.permutation(len(batches))]
        if self._batching.examples_per_row == 1:
            shapes = [(size, self._batching.padded_length(int(self._lengths[batch].max()))) for batch in batches]
            return batches, np.array(shapes, np.int64)
        layouts = [pack_rows(self._lengths[batch], self._batching) for batch in batches]
        # Unused slots are -1, which selects the last element, so append NO_EXAMPLE as the last element.
        rows = [np.append(batch, NO_EXAMPLE)[slots] for batch, (slots, _) in zip(batches, layouts, strict=True)]
        return rows, np.array([(len(slots), length) for slots, length in layouts], np.int64)

    def batch(self, step: int) -> tuple[np.ndarray, int]:
        """Returns the example indices of a step and the number of tokens per row.

        The indices are int64 [n]. For packed rows, they are [rows, K] with `NO_EXAMPLE` in unused slots.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        batches, shapes = self._epoch(epoch)
        return batches[index], int(shapes[index, 1])

    def typical_step(self) -> int:
        """Returns a step whose batch has the most common shape in the first epoch. Prefers the fullest batch."""
        batches, shapes = self._epoch(0)
        most_common, _ = self._epoch_shapes(0).most_common(1)[0]
        steps = [step for step, shape in enumerate(shapes) if tuple(shape) == most_common]
        return max(steps, key=lambda step: (np.sum(batches[step] != NO_EXAMPLE), -step))

    def shape_counts(self, step: int) -> dict[tuple[int, int], int]:
        """Counts the batch shapes (rows, tokens) of all steps before `step`."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        counts: Counter[tuple[int, int]] = Counter()
        for epoch in range(epochs):
            counts += self._epoch_shapes(0 if self._has_equal_epochs else epoch)
        return dict(counts + _count(self._epoch(epochs)[1][:rest]) if rest else counts)

    def _count_shapes(self, epoch: int) -> Counter[tuple[int, int]]:
        return _count(self._epoch(epoch)[1])


def _count(shapes: np.ndarray) -> Counter[tuple[int, int]]:
    return Counter((int(rows), int(tokens)) for rows, tokens in shapes)


def train_batches(
    examples: Examples, batching: Batching, order: EpochOrder, steps: int, start_step: int, shard: DataShard
) -> Iterator[dict[str, np.ndarray]]:
    """Yields one process's rows of the batches of steps `start_step` to `steps - 1`."""
    for step in range(start_step, steps):
        indices, length = order.batch(step)
        if batching.examples_per_row == 1:
            yield make_batch(examples, indices, length, batching.batch_size, shard)
        else:
            yield make_packed_batch(examples, indices, length, shard)
