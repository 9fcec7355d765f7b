"""Batches of fine-tuning examples; each training batch is a pure function of (examples, seed, step).

A batch contains examples of similar length. The assignment of examples to batches does not depend on the padding, so
`bucket=0`, which pads every row to `seq_len`, trains the same model more slowly.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import cache, lru_cache

import numpy as np

from bertjax.data.finetuning.examples import Examples
from bertjax.data.schema import EXAMPLE, TOKEN_LABELS
from bertjax.data.shard import SINGLE_SHARD, DataShard

# Example index in padding rows and in unused places of packed rows. It is a valid NumPy index, so lookups can be masked
# afterwards.
NO_EXAMPLE = -1
# Tokens per batch at inference, including padding. This number keeps a CPU or GPU busy, and the activations need little
# memory compared to the parameters of a BASE model.
_INFERENCE_TOKENS = 4096
_INFERENCE_BUCKET = 32
# Examples are sorted by their length, rounded up to a multiple of this number of tokens.
_LENGTH_UNIT = 32
_PADDING_VALUES = {spec.name: spec.padding for spec in (*EXAMPLE, TOKEN_LABELS)}


@dataclasses.dataclass(frozen=True)
class Batching:
    """Batch size and padding."""

    batch_size: int  # examples per global batch
    bucket: int  # rows are padded to a multiple of this number of tokens, or to `seq_len` if the number is 0
    seq_len: int  # maximum tokens per row
    # Maximum number of examples packed into a row (default: 1, no packing); divides `batch_size`.
    examples_per_row: int = 1

    def padded_length(self, length: int) -> int:
        """Returns the padded row length of a batch whose longest row has `length` tokens."""
        if not self.bucket:
            return self.seq_len
        return min(self.seq_len, max(1, -(-length // self.bucket)) * self.bucket)


def eval_batches(examples: Examples, batching: Batching, shard: DataShard) -> Iterator[dict[str, np.ndarray]]:
    """Yields one process's rows of evaluation batches. Every example occurs once, shortest first."""
    order = np.argsort(examples.lengths, kind="stable")
    for start in range(0, len(order), batching.batch_size):
        indices = order[start : start + batching.batch_size]
        length = batching.padded_length(int(examples.lengths[indices].max()))
        yield make_batch(examples, _pad_rows(indices, batching.batch_size), length, shard)


def _pad_rows(indices: np.ndarray, batch_size: int) -> np.ndarray:
    return np.pad(indices, (0, batch_size - len(indices)), constant_values=NO_EXAMPLE)


def make_batch(examples: Examples, indices: np.ndarray, length: int, shard: DataShard) -> dict[str, np.ndarray]:
    """Builds this process's B rows of a global batch, with sequences truncated or padded to `length` tokens, L.

    `indices`, int64, are the example indices of the global batch (`NO_EXAMPLE`: none). The shape [rows] selects
    unpacked rows, with one example of C sequences each. The shape [rows, K] selects packed rows, with up to K examples
    of one sequence each.

    Returns (the axis C exists only for C > 1, and the axis K only in packed rows):
      `input_mask`: int32 [B, C, L], for unpacked rows.
      `sequence_ids`, `position_ids`: int32 [B, L], for packed rows. `sequence_ids` are 1 to K, 0 for padding.
      Arrays of `examples.tokens`: [B, C, L, ...].
      Arrays of `examples.rows`: [B, K, ...].
      `example`: int32 [B, K], index of the example, -1 if unused.
      `weights`: float32 [B, K], 0 if unused, otherwise 1. For packed rows with `token_labels`, float32 [B], 0 in rows
        without examples.
    """
    indices = indices[shard.rows(len(indices))]
    is_packed, group = indices.ndim > 1, examples.sequences_per_example
    used = indices != NO_EXAMPLE
    # Sequence indices of each token row, [B * C, K]. Only unpacked rows have C > 1, and only packed rows have K > 1.
    sequences = indices if is_packed else (indices[:, None] * group + np.arange(group)).reshape(-1, 1)
    is_sequence = used if is_packed else np.repeat(used, group)[:, None]
    starts = np.where(is_sequence, examples.offsets[sequences], 0)
    lengths = np.where(is_sequence, examples.offsets[sequences + 1] - starts, 0)
    # An example longer than the row does not share its row, and `columns` truncates it to `length` tokens.
    row_starts = np.cumsum(lengths, axis=1) - lengths
    columns = np.arange(length)
    sequence_ids, position_ids, source = (np.zeros((len(sequences), length), np.int64) for _ in range(3))
    for place in range(sequences.shape[1]):
        row_start = row_starts[:, place, None]
        mask = (columns >= row_start) & (columns < row_start + lengths[:, place, None])
        sequence_ids[mask] = place + 1
        position_ids = np.where(mask, columns - row_start, position_ids)
        source = np.where(mask, starts[:, place, None] + columns - row_start, source)

    def gather(mask: np.ndarray, values: np.ndarray, places: np.ndarray, padding: int) -> np.ndarray:
        mask = mask.reshape(*mask.shape, *(1 for _ in values.shape[1:]))
        return np.where(mask, values[places], padding).astype(values.dtype)

    shape = (len(indices), group, length) if group > 1 else (len(indices), length)
    if is_packed:
        batch = {"sequence_ids": sequence_ids.astype(np.int32), "position_ids": position_ids.astype(np.int32)}
    else:
        batch = {"input_mask": sequence_ids.astype(np.int32).reshape(shape)}
    for name, values in examples.tokens.items():
        padded = gather(sequence_ids > 0, values, source, _PADDING_VALUES.get(name, 0))
        batch[name] = padded.reshape(*shape, *values.shape[1:])
    for name, values in examples.rows.items():
        batch[name] = gather(used, values, indices, 0)
    batch["example"] = np.where(used, indices, _PADDING_VALUES["example"]).astype(np.int32)
    has_row_weights = is_packed and "token_labels" in batch
    batch["weights"] = (used.any(axis=1) if has_row_weights else used).astype(np.float32)
    return batch


def in_input_order(outputs: list[dict[str, np.ndarray]], count: int) -> dict[str, list[np.ndarray]]:
    """Returns the outputs of all `count` examples, keyed by output name, in the order of the examples.

    `outputs` has one dictionary of arrays [B, ...] per batch. Its array `example` contains the example index of each
    row, or -1 in padding rows.
    """
    places = [
        (example, index, row) for index, batch in enumerate(outputs) for row, example in enumerate(batch["example"])
    ]
    places = sorted(place for place in places if place[0] != NO_EXAMPLE)
    assert [example for example, *_ in places] == [*range(count)], "each example must be evaluated exactly once"
    names = outputs[0].keys() - {"example"} if outputs else ()
    return {name: [outputs[index][name][row] for _, index, row in places] for name in names}


def pack_batch(lengths: np.ndarray, batching: Batching) -> tuple[np.ndarray, int]:
    """Packs the examples of a batch into rows with little padding. `lengths` (int64 [n]) counts each example's tokens.

    Each row has K places. The examples, longest first, fill the first place of all rows, then the second, and so on.
    The order of the rows alternates, so that long and short examples share rows. K is the divisor of
    `examples_per_row` that minimizes the number of tokens in all rows, padding included. Because `batch_size` /
    `examples_per_row` is divisible by the number of data shards, so is the number of rows, `batch_size` / K. Examples
    longer than `seq_len` are not packed.

    Returns:
      The examples of each row, as indices into `lengths` (int64 [rows, K], `NO_EXAMPLE` for unused places), and the
      padded length of the rows.
    """
    packings = []
    order = np.argsort(-lengths, kind="stable")
    for count in range(1, batching.examples_per_row + 1):
        if batching.examples_per_row % count:
            continue
        rows = batching.batch_size // count
        places = _pad_rows(order, rows * count).reshape(count, rows)
        places[1::2] = places[1::2, ::-1]
        totals = np.where(places == NO_EXAMPLE, 0, lengths[places]).sum(axis=0)
        if count == 1 or totals.max() <= batching.seq_len:
            packings.append((np.ascontiguousarray(places.T), batching.padded_length(int(totals.max()))))
    return min(packings, key=lambda packing: packing[0].shape[0] * packing[1])


class EpochOrder:
    """Random order of batches in which each epoch contains every example once.

    The examples of an epoch are shuffled, then sorted by length (rounded up to a multiple of 32 tokens), and divided
    into batches. Finally, the batches are shuffled. One batch may be smaller than the others.
    """

    def __init__(self, examples: Examples, batching: Batching, seed: int) -> None:
        self._lengths, self._batching, self._seed = examples.lengths, batching, seed
        # Use a fixed unit, so that `bucket` and `examples_per_row` do not change the order.
        self._length_buckets = -(-self._lengths // _LENGTH_UNIT)
        self.steps_per_epoch = -(-len(examples) // batching.batch_size)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self._epoch_shapes = cache(lambda epoch: Counter(self._epoch(epoch)[1]))

    def _draw_epoch(self, epoch: int) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
        """Returns the example indices of each batch, and the shape (rows, tokens) of each batch."""
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._lengths))
        order = order[np.argsort(self._length_buckets[order], kind="stable")]
        size, batching = self._batching.batch_size, self._batching
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        batches = [batches[index] for index in rng.permutation(len(batches))]
        rows, shapes = [], []
        for batch in batches:
            if batching.examples_per_row == 1:
                indices, length = _pad_rows(batch, size), batching.padded_length(int(self._lengths[batch].max()))
            else:
                places, length = pack_batch(self._lengths[batch], batching)
                # Unused places are -1, which selects the last element, so append NO_EXAMPLE as the last element.
                indices = np.append(batch, NO_EXAMPLE)[places]
            rows.append(indices)
            shapes.append((len(indices), length))
        return rows, shapes

    def batch(self, step: int) -> tuple[np.ndarray, int]:
        """Returns the example indices of a step, see `make_batch`, and the number of tokens per row."""
        epoch, index = divmod(step, self.steps_per_epoch)
        batches, shapes = self._epoch(epoch)
        return batches[index], shapes[index][1]

    def typical_step(self) -> int:
        """Returns a step of epoch 0 for benchmarks: the fullest of the steps with the most common batch shape."""
        batches, shapes = self._epoch(0)
        most_common, _ = self._epoch_shapes(0).most_common(1)[0]
        steps = [step for step, shape in enumerate(shapes) if shape == most_common]
        return max(steps, key=lambda step: (np.sum(batches[step] != NO_EXAMPLE), -step))

    def shape_counts(self, step: int) -> Counter[tuple[int, int]]:
        """Counts the steps before `step` by batch shape (rows, tokens)."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        counts: Counter[tuple[int, int]] = Counter()
        for epoch in range(epochs):
            counts.update(self._epoch_shapes(epoch))
        return counts + Counter(self._epoch(epochs)[1][:rest]) if rest else counts


def inference_batches(examples: Examples, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches that contain every example once, longest first. See `make_batch`.

    A batch has as many rows as fit into `_INFERENCE_TOKENS` tokens (at least one), so that a model compiles once per
    row length. The last batch may have fewer rows, rounded up to a power of two.
    """
    batching = Batching(1, min(_INFERENCE_BUCKET, seq_len), seq_len)
    order = np.argsort(-examples.lengths, kind="stable")
    start = 0
    while start < len(order):
        length = batching.padded_length(int(examples.lengths[order[start]]))
        num_rows = max(1, _INFERENCE_TOKENS // (length * examples.sequences_per_example))
        selected = order[start : start + num_rows]
        batch_size = min(num_rows, 1 << (len(selected) - 1).bit_length())
        yield make_batch(examples, _pad_rows(selected, batch_size), length, SINGLE_SHARD)
        start += num_rows
