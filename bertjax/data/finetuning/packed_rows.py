"""Packing of several short examples into one training row."""

import numpy as np

from bertjax.data.finetuning.examples import Batching, Examples, padding_value
from bertjax.data.shard import DataShard

# Example index of unused slots. -1 is a valid index (the last element), so unused slots can be masked after a lookup.
NO_EXAMPLE = -1


def pack_rows(lengths: np.ndarray, batching: Batching) -> tuple[np.ndarray, int]:
    """Packs the examples of a batch into rows, with as few positions as possible.

    Each row has K slots for one example each. Examples are assigned to rows longest first, in alternating direction.
    All rows are padded to the length of the fullest row. K is the divisor of `examples_per_row` with the fewest
    positions. Only divisors are tried, so that the rows can be divided among devices.

    Args:
      lengths: tokens of each example, int64 [n].
      batching: batch size and limits. An example longer than `seq_len` is never packed with other examples.

    Returns:
      A tuple (slots, tokens per row). The slots, int64 [rows, K], are indices into `lengths`, or `NO_EXAMPLE` if
      unused.
    """
    best = None
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
        if best is None or rows * length < best[0].shape[0] * best[1]:
            best = np.ascontiguousarray(dealt.T), length
    return best


def make_packed_batch(examples: Examples, indices: np.ndarray, length: int, shard: DataShard) -> dict[str, np.ndarray]:
    """Builds one process's rows of a batch with several examples per row.

    Args:
      examples: all examples, with one sequence each.
      indices: example indices of each row of the global batch, int64 [rows, K], `NO_EXAMPLE` in unused slots.
      length: tokens per row.
      shard: rows of the global batch that this process builds.

    Returns:
      `sequence_ids`: int32 [B, L], 1 to K for tokens of the row's examples, 0 for padding.
      `position_ids`: int32 [B, L].
      Arrays of `examples.tokens`: [B, L, ...].
      Arrays of `examples.rows`: [B, K, ...].
      `example`: int32 [B, K], -1 in unused slots.
      `weights`: float32 [B, K], 0 in unused slots. With `token_labels`, one weight per row, [B].
    """
    indices = indices[shard.rows(len(indices))]
    rows, slots = indices.shape
    used = indices != NO_EXAMPLE
    starts = np.where(used, examples.offsets[indices], 0)
    lengths = np.where(used, examples.offsets[indices + 1] - starts, 0)
    if slots == 1:
        # Only rows with a single slot can contain an example that is longer than the row.
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
        batch[name] = np.where(sequence_ids > 0, flat[source], padding_value(name)).astype(flat.dtype)
    for name, values in examples.rows.items():
        slot_mask = used.reshape(*used.shape, *(1 for _ in values.shape[1:]))
        batch[name] = np.where(slot_mask, values[indices], 0).astype(values.dtype)
    batch["example"] = np.where(used, indices, padding_value("example")).astype(np.int32)
    batch["weights"] = (used.any(axis=1) if "token_labels" in batch else used).astype(np.float32)
    return batch
