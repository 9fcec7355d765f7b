"""Several short examples side by side in one training row: which, and what the batch then holds; NumPy alone."""

import numpy as np

from bertjax.data.finetuning.examples import Batching, Examples, padding
from bertjax.data.shard import DataShard

NOBODY = -1


def arranged(lengths: np.ndarray, batching: Batching) -> tuple[np.ndarray, int]:
    """Puts the examples of a batch into as few positions as go.

    All rows have room for as many examples as the others, so that their number is known beforehand and splits over
    devices: the longest are dealt out first, forth and back, and each row is padded as the fullest is.

    Args:
      lengths: int64 [n], tokens of the batch's examples.
      batching: of a batch; at most `examples_per_row` share a row, and one that is longer than `seq_len` none.

    Returns:
      int64 [rows, K], places in `lengths`, NOBODY where a row has fewer; and the tokens of a row.
    """
    best = None
    order = np.argsort(-lengths, kind="stable")
    for count in range(1, batching.examples_per_row + 1):
        if batching.examples_per_row % count:
            continue
        rows = batching.batch_size // count
        places = np.full(rows * count, NOBODY)
        places[: len(order)] = order
        dealt = places.reshape(count, rows)
        dealt[1::2] = dealt[1::2, ::-1]
        totals = np.where(dealt == NOBODY, 0, lengths[dealt]).sum(axis=0)
        tokens = batching.padded(int(totals.max()))
        if count > 1 and totals.max() > batching.seq_len:
            continue
        if best is None or rows * tokens < best[0].shape[0] * best[1]:
            best = np.ascontiguousarray(dealt.T), tokens
    return best


def assemble_shared(examples: Examples, chosen: np.ndarray, length: int, share: DataShard) -> dict[str, np.ndarray]:
    """The share's rows of a batch whose rows hold several examples.

    Args:
      examples: of one sequence each.
      chosen: int64 [rows, K], the examples of each row, NOBODY where there are fewer.
      length: tokens of a row.
      share: of one process.

    Returns:
      int32 [B, L] `sequence_ids`, 1 to K and 0 for padding, `position_ids`, and one array for each of the examples'
      flat ones; one array [B, K, ...] for each of the examples' rows; `example` int32 and `weights` float32 [B, K], 0
      where there is none. Examples whose tokens have labels have `weights` [B] instead.
    """
    chosen = chosen[share.rows(len(chosen))]
    rows, most = chosen.shape
    there = chosen != NOBODY
    starts = np.where(there, examples.offsets[chosen], 0)
    lengths = np.where(there, examples.offsets[chosen + 1] - starts, 0)
    if most == 1:
        # What is longer than a row is cut; where several share it, all of them fit.
        lengths = np.minimum(lengths, length)
    firsts = np.cumsum(lengths, axis=1) - lengths
    columns = np.arange(length)
    sequence_ids, position_ids, source = (np.zeros((rows, length), np.int64) for _ in range(3))
    for place in range(most):
        first = firsts[:, place, None]
        inside = (columns >= first) & (columns < first + lengths[:, place, None])
        sequence_ids[inside] = place + 1
        position_ids = np.where(inside, columns - first, position_ids)
        source = np.where(inside, starts[:, place, None] + columns - first, source)
    batch = {"sequence_ids": sequence_ids.astype(np.int32), "position_ids": position_ids.astype(np.int32)}
    for name, flat in examples.tokens.items():
        batch[name] = np.where(sequence_ids > 0, flat[source], padding(name)).astype(flat.dtype)
    for name, values in examples.rows.items():
        inner = there.reshape(*there.shape, *(1 for _ in values.shape[1:]))
        batch[name] = np.where(inner, values[chosen], 0).astype(values.dtype)
    batch["example"] = np.where(there, chosen, padding("example")).astype(np.int32)
    batch["weights"] = (there.any(axis=1) if "token_labels" in batch else there).astype(np.float32)
    return batch
