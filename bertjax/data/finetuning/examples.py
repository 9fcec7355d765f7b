"""Fine-tuning examples in memory, and batches of them by length: NumPy alone, no TensorFlow.

A batch holds examples of about one length and is padded to the next multiple of `bucket` tokens, not to the maximum.
Which examples share a batch does not depend on the padding, so a run with `bucket=0`, which pads all to the maximum,
computes the same thing, only slower.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from bertjax.data.schema import EXAMPLE, TOKEN_LABELS, padding_of
from bertjax.data.shard import DataShard
from bertjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class Examples:
    """N examples of C sequences each: C is 1, or the number of choices in a multiple-choice task.

    Attributes:
      offsets: int64 [N * C + 1], where each sequence starts in the flat arrays, then their length.
      tokens: name to a flat array [tokens, ...] with an entry a token: `input_ids`, `segment_ids`, perhaps labels of
        tokens, or what a frozen encoder gives for them.
      rows: name to an array [N, ...] with an entry an example, such as its label.
      choices: C.
      lines: of the file they come from, one for each example; empty where they come from none. No model sees them.
    """

    offsets: np.ndarray
    tokens: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    choices: int = 1
    lines: tuple[int, ...] = ()

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.choices

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], tokens of each example's longest sequence."""
        return np.diff(self.offsets).reshape(-1, self.choices).max(axis=1)

    def fingerprint(self) -> str:
        """SHA-256 of everything a model could see."""
        digest = hashlib.sha256(self.offsets.tobytes())
        for name, array in sorted({**self.tokens, **self.rows}.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


_FILL = padding_of((*EXAMPLE, TOKEN_LABELS))


def padding(name: str) -> int:
    """What an array of a batch holds past a sequence's end, and in rows past the last example."""
    return _FILL.get(name, 0)


def make_examples(
    sequences: Iterable[dict[str, list[int]]],
    rows: dict[str, np.ndarray],
    choices: int = 1,
    lines: Sequence[int] = (),
) -> Examples:
    """Examples of encoded sequences, each a dictionary of equally long lists with `input_ids` and `segment_ids`."""
    flat: dict[str, list[int]] = {"input_ids": [], "segment_ids": []}
    offsets = [0]
    for sequence in sequences:
        for name, values in sequence.items():
            flat.setdefault(name, []).extend(values)
        offsets.append(len(flat["input_ids"]))
    tokens = {name: np.array(values, np.int32) for name, values in flat.items()}
    return Examples(np.array(offsets, np.int64), tokens, rows, choices, tuple(lines))


def joined(parts: list[Examples]) -> Examples:
    """All examples of the parts, one part after the other."""
    starts = np.cumsum([0, *(part.offsets[-1] for part in parts)])
    offsets = [part.offsets[:-1] + start for part, start in zip(parts, starts, strict=False)]
    return Examples(
        np.concatenate([*offsets, starts[-1:]]),
        {name: np.concatenate([part.tokens[name] for part in parts]) for name in parts[0].tokens},
        {name: np.concatenate([part.rows[name] for part in parts]) for name in parts[0].rows},
        parts[0].choices,
    )


def encode_pair(
    first: list[int], second: list[int] | None, seq_len: int, cls_id: int, sep_id: int
) -> dict[str, list[int]]:
    """[CLS] first [SEP], or [CLS] first [SEP] second [SEP], cut to `seq_len`.

    Of a pair that is too long, the longer text loses its last token, again and again (`_truncate_seq_pair` of
    google-research/bert `run_classifier.py`).
    """
    if second is None:
        ids = [cls_id, *first[: seq_len - 2], sep_id]
        return {"input_ids": ids, "segment_ids": [0] * len(ids)}
    a, b = truncated_lengths(len(first), len(second), seq_len - 3)
    ids = [cls_id, *first[:a], sep_id, *second[:b], sep_id]
    return {"input_ids": ids, "segment_ids": [0] * (a + 2) + [1] * (b + 1)}


def truncated_lengths(a: int, b: int, total: int) -> tuple[int, int]:
    """Lengths after cutting tokens off the longer text, the second where they are equal, down to `total`."""
    cut = max(0, a + b - total)
    level = min(cut, abs(a - b))
    a, b = (a - level, b) if a > b else (a, b - level)
    rest = cut - level
    return a - rest // 2, b - (rest - rest // 2)


@dataclasses.dataclass(frozen=True)
class Batching:
    """How examples become batches.

    Attributes:
      batch_size: examples of the global batch.
      bucket: rows are padded to a multiple of this; 0 pads to `seq_len`.
      seq_len: the maximum.
      examples_per_row: that may share a row at most; divides `batch_size`.
    """

    batch_size: int
    bucket: int
    seq_len: int
    examples_per_row: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"data.batch_size is {self.batch_size}; it must be at least 1")
        if self.bucket < 0:
            raise UsageError(f"data.bucket is {self.bucket}; it must be 0 (none) or more")
        if self.seq_len < 8:
            raise UsageError(f"data.seq_len is {self.seq_len}; a row needs at least 8 tokens")
        if self.examples_per_row < 1 or self.batch_size % self.examples_per_row:
            raise UsageError(
                f"data.examples_per_row is {self.examples_per_row}; it must divide data.batch_size={self.batch_size}"
            )

    def padded(self, length: int) -> int:
        """Tokens of a row of a batch whose longest example has `length`."""
        if not self.bucket:
            return self.seq_len
        return min(self.seq_len, max(1, -(-length // self.bucket)) * self.bucket)


def eval_batches(examples: Examples, batching: Batching, share: DataShard) -> Iterator[dict[str, np.ndarray]]:
    """Every example once, shortest first; `example` says which one a row is, -1 is padding."""
    order = np.argsort(examples.lengths, kind="stable")
    for start in range(0, len(order), batching.batch_size):
        chosen = order[start : start + batching.batch_size]
        length = batching.padded(int(examples.lengths[chosen].max()))
        yield assemble(examples, chosen, length, batching.batch_size, share)


def assemble(
    examples: Examples, chosen: np.ndarray, length: int, batch_size: int, share: DataShard
) -> dict[str, np.ndarray]:
    """The share's rows of a batch of the chosen examples, padded to `length` tokens and `batch_size` rows.

    Returns:
      int32 `input_mask` and one array for each of the examples' flat ones, [B, L, ...], or [B, C, L, ...] with several
      choices;
      one array [B, ...] for each of the examples' rows; `example` int32 [B]; `weights` float32 [B], 0 for padding.
    """
    wanted = share.rows(batch_size)
    rows, mine = len(wanted), chosen[wanted[wanted < len(chosen)]]
    choices = examples.choices
    sequences = (mine[:, None] * choices + np.arange(choices)).reshape(-1)
    starts = examples.offsets[sequences]
    lengths = np.minimum(examples.offsets[sequences + 1] - starts, length)
    columns = np.arange(length)
    inside = columns < lengths[:, None]  # [B * C, L]
    positions = np.where(inside, starts[:, None] + columns, 0)
    shape = (rows, choices, length) if choices > 1 else (rows, length)

    def padded(values: np.ndarray, count: int, fill: int = 0) -> np.ndarray:
        return np.concatenate([values, np.full((count - len(values), *values.shape[1:]), fill, values.dtype)])

    batch = {"input_mask": padded(inside.astype(np.int32), rows * choices).reshape(shape)}
    for name, flat in examples.tokens.items():
        fill, inner = padding(name), flat.shape[1:]
        values = np.where(inside.reshape(*inside.shape, *(1 for _ in inner)), flat[positions], fill)
        batch[name] = padded(values.astype(flat.dtype), rows * choices, fill).reshape(*shape, *inner)
    for name, values in examples.rows.items():
        batch[name] = padded(values[mine], rows)
    batch["example"] = padded(mine.astype(np.int32), rows, padding("example"))
    batch["weights"] = padded(np.ones(len(mine), np.float32), rows)
    return batch


def in_input_order(outputs: list[dict[str, np.ndarray]], examples: int) -> dict[str, list[np.ndarray]]:
    """What batches of `eval_batches` gave, by name, an array for each example, padding rows dropped.

    Raises:
      AssertionError: an example was evaluated twice or not at all.
    """
    names = [name for name in outputs[0] if name != "example"] if outputs else []
    ordered: dict[str, list] = {name: [None] * examples for name in names}
    seen = np.zeros(examples, np.int64)
    for output in outputs:
        for row, example in enumerate(output["example"]):
            if example >= 0:
                seen[example] += 1
                for name in names:
                    ordered[name][example] = output[name][row]
    assert (seen == 1).all(), "each example must be evaluated exactly once"
    return ordered
