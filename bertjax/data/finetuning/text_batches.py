"""Order and batches of examples of several texts, such as an anchor, a positive and negatives, for embedders.

Each training batch is a pure function of (examples, seed, step).
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache

import numpy as np

from bertjax.data.finetuning.batches import NO_EXAMPLE, Batching, make_batch, pack_batch
from bertjax.data.finetuning.examples import Examples
from bertjax.data.shard import DataShard

# Batches whose examples are exchanged so that no batch contains a text twice.
_WINDOW = 64
_TOKEN_ARRAYS = ("input_ids", "segment_ids", "sequence_ids", "position_ids")


@dataclasses.dataclass(frozen=True)
class TextExamples:
    """N examples of C texts each. Missing texts have no tokens.

    Attributes:
      name: file of the examples.
      texts: tokenized texts, C per example, N * C sequences.
      num_columns: C.
      keys: hashes of the texts, int64 [N, C], equal for equal texts; -1 for missing texts.
      rows: arrays [N, ...] by name, such as `labels`.
      weight: share of the training steps, relative to the weights of the other files.
      strings: the texts themselves, "" for missing texts; empty if no guide model needs them.
    """

    name: str
    texts: Examples
    num_columns: int
    keys: np.ndarray
    rows: dict[str, np.ndarray]
    weight: float = 1.0
    strings: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.keys)


class UniqueOrder:
    """Random order of batches in which each epoch contains every example once, and no batch contains a text twice.

    The examples of an epoch are shuffled. Within each window of 64 batches, an example moves to another batch if one of
    its texts is already in its own. An example that fits into no batch of its window is left out of this epoch. Only
    the windows of the requested steps are computed.
    """

    def __init__(self, keys: np.ndarray, batch_size: int, seed: int, unique: bool) -> None:
        """Prepares the order of N examples with `keys` [N, C]. With `unique=False`, texts may repeat in a batch."""
        self._keys, self._batch_size, self._seed, self._unique = keys, batch_size, seed, unique
        self.steps_per_epoch = -(-len(keys) // batch_size)
        self._permutation = lru_cache(maxsize=2)(
            lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(keys))
        )
        self._window = lru_cache(maxsize=2)(self._fill_window)

    def batch(self, step: int) -> np.ndarray:
        """Returns the example indices of a step, int64 [batch_size], `NO_EXAMPLE` if unused."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return self._window(epoch, index // _WINDOW)[index % _WINDOW]

    def _fill_window(self, epoch: int, window: int) -> np.ndarray:
        """Returns the example indices of up to 64 batches, int64 [batches, batch_size]."""
        size = self._batch_size
        start = window * _WINDOW * size
        examples = self._permutation(epoch)[start : start + _WINDOW * size]
        batches = np.pad(examples, (0, -len(examples) % size), constant_values=NO_EXAMPLE).reshape(-1, size)
        return self._exchange(batches) if self._unique else batches

    def _exchange(self, batches: np.ndarray) -> np.ndarray:
        """Moves examples between batches, so that each text occurs at most once in a batch."""
        texts: list[set[int]] = []
        moved: list[int] = []
        for batch in batches:
            keys = self._keys[batch]  # [batch_size, C]
            present: set[int] = set()
            for place, example_keys in enumerate(keys.tolist()):
                own = {key for key in example_keys if key != -1}
                if batch[place] == NO_EXAMPLE:
                    continue
                if own & present:
                    moved.append(int(batch[place]))
                    batch[place] = NO_EXAMPLE
                else:
                    present |= own
            texts.append(present)
        for example in moved:
            own = {key for key in self._keys[example].tolist() if key != -1}
            for batch, present in zip(batches, texts, strict=True):
                free = np.flatnonzero(batch == NO_EXAMPLE)
                if len(free) and not own & present:
                    batch[free[0]] = example
                    present |= own
                    break
        return batches

    @cached_property
    def left_out(self) -> float:
        """Fraction of the examples of the first window that fit into no batch."""
        batches = self._window(0, 0)
        return 1 - np.count_nonzero(batches != NO_EXAMPLE) / min(len(self._keys), batches.size)


class MixedOrder:
    """Order of the batches of several files. All examples of a batch are from one file.

    Attributes:
      steps_per_epoch: number of steps in which each file, with equal weights, is read once.
    """

    def __init__(self, files: Sequence[TextExamples], batch_size: int, seed: int, unique: bool) -> None:
        self._orders = [UniqueOrder(file.keys, batch_size, seed, unique) for file in files]
        self.steps_per_epoch = sum(order.steps_per_epoch for order in self._orders)
        weights = np.array([file.weight for file in files])
        self._shares = np.cumsum(weights) / weights.sum()
        self._seed = seed
        self._files = np.zeros(0, np.int64)

    def files(self, steps: int) -> np.ndarray:
        """Returns the index of the file of each of the first `steps` steps, int64 [steps]."""
        if len(self._files) < steps:
            # Draw in powers of two. A longer run continues the draws of a shorter one.
            draws = np.random.default_rng([self._seed, len(self._orders)]).random(1 << max(10, steps.bit_length()))
            self._files = np.minimum(np.searchsorted(self._shares, draws, side="right"), len(self._orders) - 1)
        return self._files[:steps]

    def batch(self, step: int) -> tuple[int, np.ndarray]:
        """Returns the file of a step, and its example indices."""
        files = self.files(step + 1)
        file = int(files[step])
        return file, self._orders[file].batch(int(np.count_nonzero(files[:step] == file)))

    @property
    def left_out(self) -> list[float]:
        """For each file, the fraction of its first examples that fit into no batch."""
        return [order.left_out for order in self._orders]


def packed_texts(texts: Examples, indices: np.ndarray, batching: Batching, shard: DataShard) -> dict[str, np.ndarray]:
    """Packs T texts with `indices` int64 [T], `NO_EXAMPLE` if missing, into rows, and returns this process's R rows.

    Returns:
      `input_ids`, `segment_ids`, `sequence_ids`, `position_ids`: int32 [R, L], see `make_batch`.
      `texts`: int32 [R, K], for each sequence of a row, its index in `indices`, or -1.
    """
    lengths = np.where(indices == NO_EXAMPLE, 0, texts.lengths[indices])
    places, length = pack_batch(lengths, dataclasses.replace(batching, batch_size=len(indices)))
    places = np.where((places != NO_EXAMPLE) & (lengths[places] > 0), places, NO_EXAMPLE)
    rows = make_batch(texts, np.where(places == NO_EXAMPLE, NO_EXAMPLE, indices[places]), length, shard)
    batch = {name: rows[name] for name in _TOKEN_ARRAYS}
    return {**batch, "texts": places[shard.rows(len(places))].astype(np.int32)}


def train_batch(
    examples: TextExamples, indices: np.ndarray, batching: Batching, shard: DataShard
) -> dict[str, np.ndarray]:
    """Builds this process's rows of a training batch with the examples `indices`, int64 [B].

    Returns the arrays of `packed_texts`, in which text t belongs to example t // C of the batch, and:
      `weights`: float32 [B], 0 if unused, otherwise 1.
      `document_weights`: float32 [B, C - 1], 0 for missing texts, otherwise 1.
      Arrays of `examples.rows`: [B, ...], 0 if unused.
    """
    used, columns = indices != NO_EXAMPLE, examples.num_columns
    keys = np.where(used[:, None], examples.keys[indices], -1)
    texts = np.where(keys == -1, NO_EXAMPLE, indices[:, None] * columns + np.arange(columns))
    own = shard.rows(len(indices))
    arrays = {
        name: np.where(used.reshape(-1, *(1,) * (values.ndim - 1)), values[indices], 0).astype(values.dtype)
        for name, values in examples.rows.items()
    }
    return {
        **packed_texts(examples.texts, texts.ravel(), batching, shard),
        "weights": used[own].astype(np.float32),
        "document_weights": (keys[own, 1:] != -1).astype(np.float32),
        **{name: values[own] for name, values in arrays.items()},
    }


def text_batches(texts: Examples, batching: Batching, shard: DataShard) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches that contain every text once, shortest first: `packed_texts`, and `example`, int32 [T]."""
    order = np.argsort(texts.lengths, kind="stable")
    for start in range(0, len(order), batching.batch_size):
        indices = order[start : start + batching.batch_size]
        indices = np.pad(indices, (0, batching.batch_size - len(indices)), constant_values=NO_EXAMPLE)
        example = indices[shard.rows(len(indices))].astype(np.int32)
        yield {**packed_texts(texts, indices, batching, shard), "example": example}
