"""Tokenized fine-tuning examples in memory, and padded batches of examples.

A batch contains examples of similar length and is padded to the next multiple of `bucket` tokens. The assignment of
examples to batches does not depend on the padding. Hence `bucket=0`, which pads every row to `seq_len`, trains the same
model more slowly.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bertjax.data.schema import EXAMPLE, TOKEN_LABELS, padding_values
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Examples:
    """N examples of C token sequences each.

    Attributes:
      offsets: start of each sequence in the flat arrays of `tokens`, then the arrays' length, int64 [N * C + 1].
      tokens: flat arrays [tokens, ...] by name: `input_ids`, `segment_ids`, and optional `token_labels` or cached
        encoder features.
      rows: arrays [N, ...] by name with one entry per example, such as `labels`.
      sequences_per_example: C (default: 1). It is larger if a task encodes several texts of an example separately,
        such as the choices of SWAG.
      lines: line number of each example in its file; empty if the examples are not from a file.
    """

    offsets: np.ndarray
    tokens: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    sequences_per_example: int = 1
    lines: tuple[int, ...] = ()

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.sequences_per_example

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens in each example's longest sequence, int64 [N]."""
        return np.diff(self.offsets).reshape(-1, self.sequences_per_example).max(axis=1)

    def fingerprint(self) -> str:
        """Returns the SHA-256 of all arrays, without `lines`."""
        digest = hashlib.sha256(self.offsets.tobytes())
        for name, array in sorted({**self.tokens, **self.rows}.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


_PADDING_VALUES = padding_values((*EXAMPLE, TOKEN_LABELS))


def padding_value(name: str) -> int:
    """Returns the value of a batch array at padding tokens and in padding rows."""
    return _PADDING_VALUES.get(name, 0)


def make_examples(
    sequences: Iterable[dict[str, list[int]]],
    rows: dict[str, np.ndarray],
    sequences_per_example: int = 1,
    lines: Sequence[int] = (),
) -> Examples:
    """Builds `Examples` from encoded sequences.

    Args:
      sequences: one dictionary of equally long lists per sequence: `input_ids`, `segment_ids` and optional others.
      rows: arrays with one entry per example, by name.
      sequences_per_example: number of consecutive sequences that form an example.
      lines: line number of each example in its file.
    """
    flat: dict[str, list[int]] = {"input_ids": [], "segment_ids": []}
    offsets = [0]
    for sequence in sequences:
        for name, values in sequence.items():
            flat.setdefault(name, []).extend(values)
        offsets.append(len(flat["input_ids"]))
    tokens = {name: np.array(values, np.int32) for name, values in flat.items()}
    return Examples(np.array(offsets, np.int64), tokens, rows, sequences_per_example, tuple(lines))


def concatenate(parts: list[Examples]) -> Examples:
    """Concatenates sets of examples; line numbers are dropped."""
    starts = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=False)]
    return Examples(
        np.concatenate([*offsets, starts[-1:]]),
        {name: np.concatenate([part.tokens[name] for part in parts]) for name in parts[0].tokens},
        {name: np.concatenate([part.rows[name] for part in parts]) for name in parts[0].rows},
        parts[0].sequences_per_example,
    )


def encode_pair(
    first: list[int], second: list[int] | None, seq_len: int, cls_id: int, sep_id: int
) -> dict[str, list[int]]:
    """Encodes one text or a pair as `[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]`.

    The texts are truncated so that the result has at most `seq_len` tokens. In a pair, the longer text is truncated
    first, as in `_truncate_seq_pair` of google-research/bert `run_classifier.py`.
    """
    if second is None:
        ids = [cls_id, *first[: seq_len - 2], sep_id]
        return {"input_ids": ids, "segment_ids": [0] * len(ids)}
    a, b = truncated_lengths(len(first), len(second), seq_len - 3)
    ids = [cls_id, *first[:a], sep_id, *second[:b], sep_id]
    return {"input_ids": ids, "segment_ids": [0] * (a + 2) + [1] * (b + 1)}


def truncated_lengths(a: int, b: int, total: int) -> tuple[int, int]:
    """Returns the lengths of two texts truncated to `total` tokens.

    Tokens are removed one at a time from the longer text, or from the second text if both are equally long.
    """
    excess = max(0, a + b - total)
    leveling = min(excess, abs(a - b))
    a, b = (a - leveling, b) if a > b else (a, b - leveling)
    rest = excess - leveling
    return a - rest // 2, b - (rest - rest // 2)


def max_context_window(windows: Sequence[tuple[int, int]], count: int, length_bonus: float = 0.0) -> np.ndarray:
    """Returns the index of the window with the most context around each of `count` positions, int64 [count].

    The context of a position is its distance to the nearer end of the window. The first window wins a tie.

    Args:
      windows: start and end (exclusive) of each window; together they cover all positions.
      length_bonus: context to add per position of the window; `_check_is_max_context` of google-research/bert
        `run_squad.py` uses 0.01.
    """
    best_context, best_window = np.full(count, -np.inf), np.zeros(count, np.int64)
    for index, (start, end) in enumerate(windows):
        positions = np.arange(start, end)
        context = np.minimum(positions - start, end - 1 - positions) + length_bonus * (end - start)
        better = context > best_context[start:end]
        best_window[positions[better]], best_context[positions[better]] = index, context[better]
    return best_window


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

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"data.batch_size is {self.batch_size}; it must be at least 1")
        if self.bucket < 0:
            raise UsageError(f"data.bucket is {self.bucket}; it must be 0 (pad to data.seq_len) or more")
        if self.seq_len < 8:
            raise UsageError(f"data.seq_len is {self.seq_len}; it must be at least 8")
        if self.examples_per_row < 1 or self.batch_size % self.examples_per_row:
            raise UsageError(
                f"data.examples_per_row is {self.examples_per_row}; it must divide data.batch_size={self.batch_size}"
            )

    def padded_length(self, length: int) -> int:
        """Returns the tokens per row of a batch whose longest row has `length` tokens."""
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
    """Builds one process's rows of a batch, padded to `length` tokens and `batch_size` global rows.

    Args:
      examples: all examples.
      indices: example indices of the global batch, at most `batch_size`.
      length: tokens per sequence; longer sequences are truncated.
      batch_size: rows of the global batch.
      shard: rows of the global batch that this process builds.

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
    mask = columns < lengths[:, None]  # [B * C, L]
    positions = np.where(mask, starts[:, None] + columns, 0)
    shape = (rows, group, length) if group > 1 else (rows, length)

    def pad_rows(values: np.ndarray, count: int, value: int = 0) -> np.ndarray:
        return np.concatenate([values, np.full((count - len(values), *values.shape[1:]), value, values.dtype)])

    batch = {"input_mask": pad_rows(mask.astype(np.int32), rows * group).reshape(shape)}
    for name, flat in examples.tokens.items():
        value, inner = padding_value(name), flat.shape[1:]
        padded = np.where(mask.reshape(*mask.shape, *(1 for _ in inner)), flat[positions], value)
        batch[name] = pad_rows(padded.astype(flat.dtype), rows * group, value).reshape(*shape, *inner)
    for name, values in examples.rows.items():
        batch[name] = pad_rows(values[shard_indices], rows)
    batch["example"] = pad_rows(shard_indices.astype(np.int32), rows, padding_value("example"))
    batch["weights"] = pad_rows(np.ones(len(shard_indices), np.float32), rows)
    return batch


def in_input_order(outputs: list[dict[str, np.ndarray]], count: int) -> dict[str, list[np.ndarray]]:
    """Sorts the model outputs for `eval_batches` into the order of the examples, and drops padding rows.

    Args:
      outputs: for each batch, arrays [B, ...] by name; `example` is the example index of each row.
      count: number of examples.

    Returns:
      One array per example for each name except `example`.
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


def known_labels(labels: np.ndarray) -> np.ndarray:
    """Returns a mask of the labeled examples, bool [N]. For multi-label data, all K labels must be known."""
    if labels.ndim > 1:
        return (labels >= 0).all(axis=1)
    return np.isfinite(labels) if labels.dtype.kind == "f" else labels >= 0


def constant_prediction(labels: np.ndarray) -> np.ndarray:
    """Returns a constant prediction for every example: the most frequent known label, or the mean for regression."""
    known = labels[known_labels(labels)]
    value = np.mean(known) if labels.dtype.kind == "f" else np.bincount(known).argmax()
    return np.full(len(labels), value)
