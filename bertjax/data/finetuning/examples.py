"""Tokenized fine-tuning examples in memory."""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import UsageError


class Source(abc.ABC):
    """Rows of a data file that can be divided into training and dev rows."""

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def texts(self) -> list[bytes]:
        """Returns the text of each row. Rows or documents with equal texts go to the same split."""

    @abc.abstractmethod
    def subset(self, indices: np.ndarray) -> Self:
        """Returns the rows with the given indices, in that order."""

    def document_numbers(self) -> Sequence[int]:
        """Returns the document index of each row, ascending (default: one document per row)."""
        return range(len(self))


@dataclasses.dataclass(frozen=True)
class Examples(Source):
    """N examples of C token sequences each."""

    # Start of each sequence in the flat arrays of `tokens`, then the arrays' length, int64 [N * C + 1].
    offsets: np.ndarray
    # Flat arrays [tokens, ...] by name: `input_ids`, `segment_ids`, and optional `token_labels` or cached encoder
    # features.
    tokens: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]  # arrays [N, ...] by name with one value per example, such as `labels`
    # C (default: 1). It is larger if a task encodes several texts of an example separately, such as the choices of
    # SWAG.
    sequences_per_example: int = 1
    lines: tuple[int, ...] = ()  # line number of each example in its file; empty if unknown

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.sequences_per_example

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens in each example's longest sequence, int64 [N]."""
        return np.diff(self.offsets).reshape(-1, self.sequences_per_example).max(axis=1)

    def fingerprint(self) -> str:
        """Returns the SHA-256 of `offsets`, `tokens` and `rows`."""
        digest = hashlib.sha256(self.offsets.tobytes())
        for name, array in sorted({**self.tokens, **self.rows}.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def texts(self) -> list[bytes]:
        """Returns the token ids of each example's first segment, to find examples with equal first texts."""
        ids, is_first = self.tokens["input_ids"], self.tokens["segment_ids"] == 0
        starts, ends = (self.offsets[index :: self.sequences_per_example][: len(self)] for index in (0, 1))
        return [ids[start:end][is_first[start:end]].tobytes() for start, end in zip(starts, ends, strict=True)]

    def subset(self, indices: np.ndarray) -> "Examples":
        group = self.sequences_per_example
        sequences = (indices[:, None] * group + np.arange(group)).reshape(-1)
        lengths = np.diff(self.offsets)[sequences]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        tokens = np.arange(offsets[-1]) + np.repeat(self.offsets[sequences] - offsets[:-1], lengths)
        return Examples(
            offsets,
            {name: values[tokens] for name, values in self.tokens.items()},
            {name: values[indices] for name, values in self.rows.items()},
            group,
            tuple(self.lines[index] for index in indices) if self.lines else (),
        )


def make_examples(
    sequences: Iterable[dict[str, list[int]]],
    rows: dict[str, np.ndarray],
    sequences_per_example: int = 1,
    lines: Sequence[int] = (),
) -> Examples:
    """Builds `Examples`. Each sequence is a dict of equally long lists: `input_ids`, `segment_ids` and others."""
    flat: dict[str, list[int]] = {"input_ids": [], "segment_ids": []}
    offsets = [0]
    for sequence in sequences:
        for name, values in sequence.items():
            flat.setdefault(name, []).extend(values)
        offsets.append(len(flat["input_ids"]))
    tokens = {name: np.array(values, np.int32) for name, values in flat.items()}
    return Examples(np.array(offsets, np.int64), tokens, rows, sequences_per_example, tuple(lines))


def concatenate(parts: list[Examples]) -> Examples:
    """Concatenates sets of examples. Drops line numbers."""
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Examples(
        np.concatenate([[0], np.cumsum(lengths)]),
        {name: np.concatenate([part.tokens[name] for part in parts]) for name in parts[0].tokens},
        {name: np.concatenate([part.rows[name] for part in parts]) for name in parts[0].rows},
        parts[0].sequences_per_example,
    )


def encode_pair(
    first: list[int], second: list[int] | None, seq_len: int, vocabulary: Vocabulary
) -> dict[str, list[int]]:
    """Encodes one text or a pair as `[CLS] first [SEP]` or `[CLS] first [SEP] second [SEP]`.

    Some tokenizers have two [SEP] between the texts of a pair, or none at the end. `segment_ids` of `second` are 1.
    Truncates to `seq_len` tokens, in a pair the longer text first, as google-research/bert `run_classifier.py` does.
    """
    end, middle = ([vocabulary.sep_id] * count for count in (vocabulary.end_separators, vocabulary.pair_separators))
    if second is None:
        ids = [vocabulary.cls_id, *first[: vocabulary.room(seq_len)], *end]
        return {"input_ids": ids, "segment_ids": [0] * len(ids)}
    if not middle:
        raise UsageError(f"bertjax does not support text pairs with the tokenizer {vocabulary.path}; use single texts")
    room = vocabulary.room(seq_len, num_texts=2)
    # Lengths after removing one token at a time from the longer text or, in a tie, from the second.
    a = min(len(first), max(room - len(second), (room + 1) // 2))
    b = min(len(second), max(room - len(first), room // 2))
    ids = [vocabulary.cls_id, *first[:a], *middle, *second[:b], *end]
    return {"input_ids": ids, "segment_ids": [0] * (a + 1 + len(middle)) + [1] * (b + len(end))}


def max_context_window(windows: Sequence[tuple[int, int]], count: int, length_bonus: float = 0.0) -> np.ndarray:
    """Returns the index of the window with the most context around each of `count` positions, int64 [count].

    The context of a position is its distance to the nearer end of the window, plus `length_bonus` times the length of
    the window. The first window wins a tie. `windows` are pairs of start and end (exclusive).
    """
    best_context, best_window = np.full(count, -np.inf), np.zeros(count, np.int64)
    for index, (start, end) in enumerate(windows):
        positions = np.arange(start, end)
        context = np.minimum(positions - start, end - 1 - positions) + length_bonus * (end - start)
        better = context > best_context[start:end]
        best_window[positions[better]], best_context[positions[better]] = index, context[better]
    return best_window


def known_labels(labels: np.ndarray) -> np.ndarray:
    """Returns a mask of the labeled examples, bool [N]. For multi-label data, all K labels must be known."""
    if labels.ndim > 1:
        return np.all(labels >= 0, axis=1)
    return np.isfinite(labels) if labels.dtype.kind == "f" else labels >= 0


def constant_prediction(labels: np.ndarray) -> np.ndarray:
    """Returns a constant prediction for all rows: the most frequent class, the mean, or the labels of most rows."""
    known = labels[known_labels(labels)]
    if labels.ndim > 1:
        return np.tile((known.mean(axis=0) > 0.5).astype(np.int64), (len(labels), 1))
    value = np.mean(known) if labels.dtype.kind == "f" else np.bincount(known).argmax()
    return np.full(len(labels), value)
