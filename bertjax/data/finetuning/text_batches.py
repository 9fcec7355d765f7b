"""Batches for embedders. An example has several texts, such as an anchor, a positive and negatives.

Each training batch is a pure function of (examples, seed, step).
"""

import dataclasses
from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from bertjax.data.finetuning.batches import NO_EXAMPLE, Batching, make_batch, pack_batch
from bertjax.data.finetuning.examples import Examples
from bertjax.data.shard import DataShard

# Number of consecutive batches that exchange examples, so that no batch contains a text twice.
_WINDOW = 64
_TOKEN_ARRAYS = ("input_ids", "segment_ids", "sequence_ids", "position_ids")


@dataclasses.dataclass(frozen=True)
class TextExamples:
    """N examples of C texts each. Missing texts have no tokens."""

    name: str  # file of the examples
    texts: Examples  # tokenized texts, C per example, N * C sequences
    num_columns: int  # C
    keys: np.ndarray  # hashes of the texts, int64 [N, C], equal for equal texts; -1 for missing texts
    rows: dict[str, np.ndarray]  # arrays [N, ...] by name, such as `labels`
    weight: float = 1.0  # share of the training steps, relative to the weights of the other files
    strings: Sequence[str] = ()  # the texts themselves, "" for missing texts; empty if no guide model needs them

    def __len__(self) -> int:
        return len(self.keys)


class BatchOrder:
    """Random order of batches in which each epoch contains every example at most once.

    No batch contains an anchor or positive twice. The examples of an epoch are shuffled. Then, within each window of 64
    batches, an example moves to another batch if its own batch already contains its anchor or positive. If every batch
    of the window is full or contains one of these texts, the epoch omits the example. Windows are computed on demand.
    """

    def __init__(self, keys: np.ndarray, batch_size: int, seed: int, unique: bool) -> None:
        """Prepares the order of N examples.

        `keys` [N, C] are hashes of their texts. With `unique=False`, texts may repeat in a batch.
        """
        keys = keys[:, :2]
        self._keys, self._batch_size, self._unique = keys, batch_size, unique
        self.steps_per_epoch = -(-len(keys) // batch_size)
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(keys))
        )
        self._window = lru_cache(maxsize=2)(self._fill_window)

    def batch(self, step: int) -> np.ndarray:
        """Returns the example indices of a step, int64 [batch_size], `NO_EXAMPLE` in unused places."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return self._window(epoch, index // _WINDOW)[index % _WINDOW]

    def _fill_window(self, epoch: int, window: int) -> np.ndarray:
        """Returns the example indices of up to 64 batches, int64 [batches, batch_size]."""
        size = self._batch_size
        start = window * _WINDOW * size
        examples = self._permutation(epoch)[start : start + _WINDOW * size]
        batches = np.pad(examples, (0, -len(examples) % size), constant_values=NO_EXAMPLE).reshape(-1, size)
        if not self._unique:
            return batches
        # Move examples between batches, so that each anchor and positive occurs at most once in a batch.
        texts: list[set[int]] = [set() for _ in batches]
        moved: list[int] = []
        for batch, present in zip(batches, texts, strict=True):
            for place in np.flatnonzero(batch != NO_EXAMPLE):
                own = {*self._keys[batch[place]].tolist()} - {-1}
                if present.isdisjoint(own):
                    present |= own
                else:
                    moved.append(int(batch[place]))
                    batch[place] = NO_EXAMPLE
        free = [np.flatnonzero(batch == NO_EXAMPLE).tolist()[::-1] for batch in batches]
        for example in moved:
            own = {*self._keys[example].tolist()} - {-1}
            for batch, present, places in zip(batches, texts, free, strict=True):
                if places and present.isdisjoint(own):
                    batch[places.pop()] = example
                    present |= own
                    break
        return batches

    @cached_property
    def left_out_fraction(self) -> float:
        """Fraction of the examples in the first window that the first epoch omits."""
        batches = self._window(0, 0)
        return 1 - np.count_nonzero(batches != NO_EXAMPLE) / min(len(self._keys), batches.size)


class MixedOrder:
    """Order of the batches of several files. All examples of a batch are from one file.

    Attributes:
      orders: order of each file's examples.
      steps_per_epoch: sum of `steps_per_epoch` over all files.
    """

    def __init__(self, files: Sequence[TextExamples], batch_size: int, seed: int, unique: bool) -> None:
        self.orders = [BatchOrder(file.keys, batch_size, seed, unique) for file in files]
        self.steps_per_epoch = sum(order.steps_per_epoch for order in self.orders)
        weights = np.array([file.weight for file in files])
        self._shares = np.cumsum(weights) / weights.sum()
        self._seed = seed
        self._files = np.zeros(0, np.int64)

    def files(self, steps: int) -> np.ndarray:
        """Returns the file index of each step before `steps`, int64 [steps]."""
        if len(self._files) < steps:
            # Round the number of draws up to a power of two, to redraw rarely. A longer draw with the same seed starts
            # with the same values, so earlier steps keep their file.
            draws = np.random.default_rng([self._seed, len(self.orders)]).random(1 << max(10, steps.bit_length()))
            self._files = np.minimum(np.searchsorted(self._shares, draws, side="right"), len(self.orders) - 1)
        return self._files[:steps]

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Returns the file index of a step, and the indices of the step's examples in this file."""
        files = self.files(step + 1)
        file = int(files[step])
        return file, self.orders[file].batch(int(np.count_nonzero(files[:step] == file)))


def train_batch(
    examples: TextExamples, indices: np.ndarray, batching: Batching, shard: DataShard, unique: bool = False
) -> dict[str, np.ndarray]:
    """Builds this process's part of a global batch: R rows of packed texts, and arrays of B examples.

    `indices`, int64 [batch size], select the examples (`NO_EXAMPLE`: none). With `unique`, omits negatives whose text
    is already in the batch, because every document of the batch is a candidate for all anchors.

    Returns:
      `input_ids`, `segment_ids`, `sequence_ids`, `position_ids`: int32 [R, L], rows of packed texts, see `make_batch`.
      `texts`: int32 [R, K], `C * b + column` of each text, where `indices[b]` is its example; -1 if unused.
      `weights`: float32 [B], 0 if unused, otherwise 1.
      `document_weights`: float32 [B, C - 1], 0 for missing texts, otherwise 1.
      Arrays of `examples.rows`: [B, ...], 0 if unused.
    """
    used, columns = indices != NO_EXAMPLE, examples.num_columns
    keys = np.where(used[:, None], examples.keys[indices], -1)
    if unique:
        # Omit negatives whose text occurs earlier in the batch, in column-major order. Keep anchors and positives.
        by_column = keys.T.ravel()
        is_kept = np.arange(len(by_column)) < 2 * len(keys)  # anchors and positives
        is_kept[np.unique(by_column, return_index=True)[1]] = True
        keys = np.where(is_kept.reshape(-1, len(keys)).T, keys, -1)
    texts = np.where(keys == -1, NO_EXAMPLE, indices[:, None] * columns + np.arange(columns)).ravel()
    lengths = np.where(texts == NO_EXAMPLE, 0, examples.texts.lengths[texts])
    places, length = pack_batch(lengths, dataclasses.replace(batching, batch_size=len(texts)))
    places = np.where((places != NO_EXAMPLE) & (lengths[places] > 0), places, NO_EXAMPLE)
    rows = make_batch(examples.texts, np.where(places == NO_EXAMPLE, NO_EXAMPLE, texts[places]), length, shard)
    arrays = {name: values[indices] for name, values in examples.rows.items()}
    for values in arrays.values():
        values[~used] = 0
    own = shard.rows(len(indices))
    return {
        **{name: rows[name] for name in _TOKEN_ARRAYS},
        "texts": places[shard.rows(len(places))].astype(np.int32),
        "weights": used[own].astype(np.float32),
        "document_weights": (keys[own, 1:] != -1).astype(np.float32),
        **{name: values[own] for name, values in arrays.items()},
    }
