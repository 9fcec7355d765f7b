"""Batches of fine-tuning examples; each training batch is a pure function of (examples, seed, step).

A batch contains examples of similar length and is padded to the next multiple of `bucket` tokens. The assignment of
examples to batches does not depend on the padding. Hence `bucket=0`, which pads every row to `seq_len`, trains the same
model more slowly. Several short examples can be packed into one training row.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from functools import cache, lru_cache

import numpy as np

from bertjax.data.finetuning.examples import Examples
from bertjax.data.schema import EXAMPLE, TOKEN_LABELS, padding_values
from bertjax.data.shard import SINGLE_SHARD, DataShard

# Example index in the unused slots of packed rows. It is a valid NumPy index, so lookups can be masked afterwards.
NO_EXAMPLE = -1
# Tokens per batch at inference, including padding. This number keeps a CPU or GPU busy, and the activations need little
# memory compared to the parameters of a BASE model.
_INFERENCE_TOKENS = 4096
_INFERENCE_BUCKET = 32
# Examples are sorted by their length, rounded up to a multiple of this number of tokens.
_LENGTH_UNIT = 32
_PADDING_VALUES = padding_values((*EXAMPLE, TOKEN_LABELS))


@dataclasses.dataclass(frozen=True)
class Batching:
    """Batch size and padding.

    Attributes:
      batch_size: examples per global batch.
      bucket: rows are padded to a multiple of this number of tokens, or to `seq_len` if the number is 0.
      seq_len: maximum tokens per row.
      examples_per_row: maximum number of examples packed into a row (default: 1, no packing); divides `batch_size`.
    """

    batch_size: int
    bucket: int
    seq_len: int
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
        yield make_batch(examples, indices, length, batching.batch_size, shard)


def make_batch(
    examples: Examples, indices: np.ndarray, length: int, batch_size: int, shard: DataShard
) -> dict[str, np.ndarray]:
    """Builds this process's B rows of a global batch of `batch_size` rows.

    `indices` lists the examples of the global batch, at most `batch_size`. Padding rows complete the batch. Sequences
    are truncated or padded to `length` tokens, L.

    Returns:
      `input_mask`: int32 [B, L], or [B, C, L] for C > 1 sequences per example.
      Arrays of `examples.tokens`: [B, L, ...] or [B, C, L, ...].
      Arrays of `examples.rows`: [B, ...].
      `example`: int32 [B], index of the example, -1 in padding rows.
      `weights`: float32 [B], 0 in padding rows, otherwise 1.
    """
    shard_rows = shard.rows(batch_size)
    rows, shard_indices = len(shard_rows), indices[shard_rows[shard_rows < len(indices)]]
    group = examples.sequences_per_example
    sequences = (shard_indices[:, None] * group + np.arange(group)).reshape(-1)
    starts = examples.offsets[sequences]
    lengths = np.minimum(examples.offsets[sequences + 1] - starts, length)
    columns = np.arange(length)
    mask = columns < lengths[:, None]  # [n * C, L], n <= B
    positions = np.where(mask, starts[:, None] + columns, 0)
    shape = (rows, group, length) if group > 1 else (rows, length)

    def pad_rows(values: np.ndarray, count: int, value: int = 0) -> np.ndarray:
        return np.concatenate([values, np.full((count - len(values), *values.shape[1:]), value, values.dtype)])

    batch = {"input_mask": pad_rows(mask.astype(np.int32), rows * group).reshape(shape)}
    for name, flat in examples.tokens.items():
        value, inner = _padding_value(name), flat.shape[1:]
        padded = np.where(mask.reshape(*mask.shape, *(1 for _ in inner)), flat[positions], value)
        batch[name] = pad_rows(padded.astype(flat.dtype), rows * group, value).reshape(*shape, *inner)
    for name, values in examples.rows.items():
        batch[name] = pad_rows(values[shard_indices], rows)
    batch["example"] = pad_rows(shard_indices.astype(np.int32), rows, _padding_value("example"))
    batch["weights"] = pad_rows(np.ones(len(shard_indices), np.float32), rows)
    return batch


def in_input_order(outputs: list[dict[str, np.ndarray]], count: int) -> dict[str, list[np.ndarray]]:
    """Collects the model outputs of `eval_batches` in the order of the examples, without padding rows.

    Args:
      outputs: for each batch, arrays [B, ...] by name; `example` is the example index of each row.
      count: number of examples.

    Returns:
      For each name except `example`, a list with one array per example.
    """
    names = [name for name in outputs[0] if name != "example"] if outputs else []
    ordered: dict[str, list] = {name: [None] * count for name in names}
    seen = np.zeros(count, np.int64)
    for output in outputs:
        for row, example in enumerate(output["example"]):
            if example >= 0:
                seen[example] += 1
                for name in names:
                    ordered[name][example] = output[name][row]
    assert (seen == 1).all(), "each example must be evaluated exactly once"
    return ordered


def pack_batch(lengths: np.ndarray, batching: Batching) -> tuple[np.ndarray, int]:
    """Packs the examples of a batch into rows with little padding.

    Each row has K slots, which hold one example each. Examples are assigned to the rows slot by slot, in order of
    decreasing length. The order of the rows is reversed for every second slot, so that long and short examples share
    rows. All rows are padded to the length of the fullest row. K is the divisor of `examples_per_row` that minimizes
    rows * tokens per row. It must be a divisor, so that the number of rows (`batch_size` / K) is divisible by the
    number of data shards.

    Args:
      lengths: tokens of each example, int64 [n].
      batching: batch size and padding. An example longer than `seq_len` is never packed with other examples.

    Returns:
      A tuple (slots, tokens per row). The slots, int64 [rows, K], are indices into `lengths`, or `NO_EXAMPLE` if
      unused.
    """
    packings = []
    order = np.argsort(-lengths, kind="stable")
    for count in range(1, batching.examples_per_row + 1):
        if batching.examples_per_row % count:
            continue
        rows = batching.batch_size // count
        slots = np.full(rows * count, NO_EXAMPLE)
        slots[: len(order)] = order
        dealt = slots.reshape(count, rows)
        dealt[1::2] = dealt[1::2, ::-1]
        totals = np.where(dealt == NO_EXAMPLE, 0, lengths[dealt]).sum(axis=0)
        length = batching.padded_length(int(totals.max()))
        if count > 1 and totals.max() > batching.seq_len:
            continue
        packings.append((np.ascontiguousarray(dealt.T), length))
    return min(packings, key=lambda packing: packing[0].shape[0] * packing[1])


def make_packed_batch(examples: Examples, indices: np.ndarray, length: int, shard: DataShard) -> dict[str, np.ndarray]:
    """Builds one process's rows of a batch with several examples per row and `length` tokens per row.

    The examples have one sequence each. `indices` are the example indices of each row of the global batch, int64
    [rows, K], `NO_EXAMPLE` in unused slots.

    Returns:
      `sequence_ids`: int32 [B, L], 1 to K for tokens of the row's examples, 0 for padding.
      `position_ids`: int32 [B, L].
      Arrays of `examples.tokens`: [B, L, ...].
      Arrays of `examples.rows`: [B, K, ...].
      `example`: int32 [B, K], -1 in unused slots.
      `weights`: float32 [B, K], 0 in unused slots, otherwise 1. If `examples.tokens` contains `token_labels`, the
        weights are per row instead: float32 [B], 0 in rows without examples.
    """
    indices = indices[shard.rows(len(indices))]
    rows, slots = indices.shape
    used = indices != NO_EXAMPLE
    starts = np.where(used, examples.offsets[indices], 0)
    lengths = np.where(used, examples.offsets[indices + 1] - starts, 0)
    if slots == 1:
        # Truncate examples that are longer than the row. They occur only in rows with a single slot.
        lengths = np.minimum(lengths, length)
    row_starts = np.cumsum(lengths, axis=1) - lengths
    columns = np.arange(length)
    sequence_ids, position_ids, source = (np.zeros((rows, length), np.int64) for _ in range(3))
    for slot in range(slots):
        row_start = row_starts[:, slot, None]
        mask = (columns >= row_start) & (columns < row_start + lengths[:, slot, None])
        sequence_ids[mask] = slot + 1
        position_ids = np.where(mask, columns - row_start, position_ids)
        source = np.where(mask, starts[:, slot, None] + columns - row_start, source)
    batch = {"sequence_ids": sequence_ids.astype(np.int32), "position_ids": position_ids.astype(np.int32)}
    for name, flat in examples.tokens.items():
        batch[name] = np.where(sequence_ids > 0, flat[source], _padding_value(name)).astype(flat.dtype)
    for name, values in examples.rows.items():
        slot_mask = used.reshape(*used.shape, *(1 for _ in values.shape[1:]))
        batch[name] = np.where(slot_mask, values[indices], 0).astype(values.dtype)
    batch["example"] = np.where(used, indices, _padding_value("example")).astype(np.int32)
    batch["weights"] = (used.any(axis=1) if "token_labels" in batch else used).astype(np.float32)
    return batch


class EpochOrder:
    """Random order of batches in which each epoch contains every example once.

    The examples of an epoch are shuffled, then sorted by length (rounded up to a multiple of 32 tokens), and divided
    into batches. Finally, the batches are shuffled. One batch may be smaller than the others.
    """

    def __init__(self, examples: Examples, batching: Batching, seed: int) -> None:
        self._lengths, self._batching, self._seed = examples.lengths, batching, seed
        # The unit does not depend on `bucket` and `examples_per_row`, so these settings do not change the order.
        self._length_buckets = -(-self._lengths // _LENGTH_UNIT)
        self.steps_per_epoch = -(-len(examples) // batching.batch_size)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self._epoch_shapes = cache(lambda epoch: Counter(self._epoch(epoch)[1]))
        # After sorting, all epochs have the same sequence of length buckets. If `bucket` is a multiple of the unit, all
        # epochs therefore have the same batch shapes.
        self._has_equal_epochs = batching.examples_per_row == 1 and batching.bucket % _LENGTH_UNIT == 0

    def _draw_epoch(self, epoch: int) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
        """Returns the example indices of each batch, and the shape (rows, tokens) of each batch."""
        rng = np.random.default_rng([self._seed, epoch])
        order = rng.permutation(len(self._lengths))
        order = order[np.argsort(self._length_buckets[order], kind="stable")]
        size = self._batching.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        batches = [batches[index] for index in rng.permutation(len(batches))]
        if self._batching.examples_per_row == 1:
            return batches, [(size, self._batching.padded_length(int(self._lengths[batch].max()))) for batch in batches]
        layouts = [pack_batch(self._lengths[batch], self._batching) for batch in batches]
        # Unused slots are -1, which selects the last element, so append NO_EXAMPLE as the last element.
        rows = [np.append(batch, NO_EXAMPLE)[slots] for batch, (slots, _) in zip(batches, layouts, strict=True)]
        return rows, [(len(slots), length) for slots, length in layouts]

    def batch(self, step: int) -> tuple[np.ndarray, int]:
        """Returns the example indices of a step and the number of tokens per row.

        The indices are int64 [n]. For packed rows, they are [rows, K] with `NO_EXAMPLE` in unused slots.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        batches, shapes = self._epoch(epoch)
        return batches[index], shapes[index][1]

    def typical_step(self) -> int:
        """Returns a typical step of the first epoch, for benchmarks.

        Among the steps with the most common batch shape, this is the first one with the most examples.
        """
        batches, shapes = self._epoch(0)
        most_common, _ = self._epoch_shapes(0).most_common(1)[0]
        steps = [step for step, shape in enumerate(shapes) if shape == most_common]
        return max(steps, key=lambda step: (np.sum(batches[step] != NO_EXAMPLE), -step))

    def shape_counts(self, step: int) -> Counter[tuple[int, int]]:
        """Counts the steps before `step` by batch shape (rows, tokens)."""
        epochs, rest = divmod(step, self.steps_per_epoch)
        counts: Counter[tuple[int, int]] = Counter()
        for epoch in range(epochs):
            counts += self._epoch_shapes(0 if self._has_equal_epochs else epoch)
        return counts + Counter(self._epoch(epochs)[1][:rest]) if rest else counts


def inference_batches(examples: Examples, seq_len: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches that contain every example once, longest first.

    Rows are padded to a multiple of 32 tokens. A batch has as many rows as fit into `_INFERENCE_TOKENS` tokens (at
    least one), so that a model compiles once per row length. The last batch may have fewer rows, rounded up to a power
    of two.

    Yields:
      A batch. Its `example` array [B] contains the index of each row's example, or -1 for padding rows.
    """
    batching = Batching(1, min(_INFERENCE_BUCKET, seq_len), seq_len)
    order = np.argsort(-examples.lengths, kind="stable")
    start = 0
    while start < len(order):
        length = batching.padded_length(int(examples.lengths[order[start]]))
        num_rows = max(1, _INFERENCE_TOKENS // (length * examples.sequences_per_example))
        selected = order[start : start + num_rows]
        batch_size = min(num_rows, 1 << (len(selected) - 1).bit_length())
        yield make_batch(examples, selected, length, batch_size, SINGLE_SHARD)
        start += num_rows


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


def _padding_value(name: str) -> int:
    """Returns the fill value of a batch array for padding tokens and padding rows."""
    return _PADDING_VALUES.get(name, 0)
