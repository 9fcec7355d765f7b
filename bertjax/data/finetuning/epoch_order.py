"""Which examples each training step takes, and in how many rows of how many tokens: NumPy alone."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from bertjax.data.finetuning.examples import Batching, Examples, assemble
from bertjax.data.finetuning.packed_rows import NOBODY, arranged, assemble_shared
from bertjax.data.shard import DataShard

_GROUP_TOKENS = 32


class TrainPlan:
    """Which examples each step takes: all of them once an epoch, batches of like length in random order.

    The examples of an epoch are drawn in a random order that (seed, epoch) fixes, put in order of length but for what
    the order of draw decides, and cut into batches; the batches come in random order. The last one cut may be short.
    """

    def __init__(self, examples: Examples, batching: Batching, seed: int) -> None:
        self._lengths, self._batching, self._seed = examples.lengths, batching, seed
        # The same groups whatever the padding, and whether rows are shared, so that these change nothing but the speed.
        self._groups = -(-self._lengths // _GROUP_TOKENS)
        self.steps_per_epoch = -(-len(examples) // batching.batch_size)
        self._epoch = lru_cache(maxsize=2)(self._draw)
        self._shapes_of_epoch = lru_cache(maxsize=None)(self._count)
        # A batch's longest example is in the same group in every epoch, so its rows are as long where these do not
        # end inside a group.
        self._is_the_same_each_epoch = batching.examples_per_row == 1 and batching.bucket % _GROUP_TOKENS == 0

    def _draw(self, epoch: int) -> tuple[list[np.ndarray], np.ndarray]:
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._lengths))
        order = order[np.argsort(self._groups[order], kind="stable")]
        size = self._batching.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        batches = [batches[index] for index in rng.permutation(len(batches))]
        if self._batching.examples_per_row == 1:
            shapes = [(size, self._batching.padded(int(self._lengths[batch].max()))) for batch in batches]
            return batches, np.array(shapes, np.int64)
        made = [arranged(self._lengths[batch], self._batching) for batch in batches]
        # A place that nobody has is the last of a list with NOBODY at its end.
        rows = [np.append(batch, NOBODY)[places] for batch, (places, _) in zip(batches, made, strict=True)]
        return rows, np.array([(len(places), tokens) for places, tokens in made], np.int64)

    def batch(self, step: int) -> tuple[np.ndarray, int]:
        """Examples of a step, and the tokens of its rows.

        The examples are int64 [n], one a row; or [rows, K] where several may share a row, NOBODY where fewer do.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        batches, shapes = self._epoch(epoch)
        return batches[index], int(shapes[index, 1])

    def usual_step(self) -> int:
        """A step of the first epoch whose batch has the shape that most have, full of examples where any such is."""
        batches, shapes = self._epoch(0)
        usual, _ = self._shapes_of_epoch(0).most_common(1)[0]
        steps = [step for step, shape in enumerate(shapes) if tuple(shape) == usual]
        return max(steps, key=lambda step: (np.sum(batches[step] != NOBODY), -step))

    def shapes(self, step: int) -> dict[tuple[int, int], int]:
        """How many of the steps before `step` have so many rows of so many tokens."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        counts: Counter[tuple[int, int]] = Counter()
        for epoch in range(epochs):
            counts += self._shapes_of_epoch(0 if self._is_the_same_each_epoch else epoch)
        return dict(counts + _counted(self._epoch(epochs)[1][:rest]) if rest else counts)

    def _count(self, epoch: int) -> Counter[tuple[int, int]]:
        return _counted(self._epoch(epoch)[1])


def _counted(shapes: np.ndarray) -> Counter[tuple[int, int]]:
    """How often each of the shapes [n, 2] is there."""
    return Counter((int(rows), int(tokens)) for rows, tokens in shapes)


def train_batches(
    examples: Examples, batching: Batching, plan: TrainPlan, steps: int, start_step: int, share: DataShard
) -> Iterator[dict[str, np.ndarray]]:
    """One process's rows of the batches of steps `start_step` to `steps - 1`."""
    for step in range(start_step, steps):
        chosen, length = plan.batch(step)
        if batching.examples_per_row == 1:
            yield assemble(examples, chosen, length, batching.batch_size, share)
        else:
            yield assemble_shared(examples, chosen, length, share)
