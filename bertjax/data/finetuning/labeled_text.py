"""Tokenization of table rows with a label and one or several texts."""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.cells import is_literal, is_missing, label_key, label_name, read_list
from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.errors import UsageError, listed, quoted

_UNLABELED = "with an empty label"
_BINARY_VALUES = {"0": 0, "1": 1, "false": 0, "true": 1}


@dataclasses.dataclass(frozen=True)
class Target:
    """Label column of a table."""

    column: str  # name of the column
    labels: Sequence[str]  # class names in the order of their ids; empty for regression, or if not yet known
    separator: str = ""  # separator of the labels in a multi-label column (default: "", exactly one label per row)

    def to_array(self, values: Sequence[Any]) -> np.ndarray:
        """Converts the labels of N rows, as returned by `read`, to an array.

        Returns class ids, int32 [N], or for multi-label data zeros and ones, int32 [N, K], with -1 for missing labels.
        For regression, returns numbers, float32 [N], with NaN for missing labels.
        """
        missing = [-1] * len(self.labels) if self.separator else -1 if self.labels else np.nan
        values = [missing if value is None else value for value in values]
        return np.array(values, np.int32 if self.labels else np.float32)

    def names(self, row: Row, stats: ReadStats) -> list[str] | None:
        """Returns the names in the label column, or None if the label is missing.

        A cell such as NaN or None means "missing" and is counted in `stats`, unless it is one of `labels`. In
        multi-label data, an empty cell is not missing: it means no labels.
        """
        cell, place = row.fields[self.column], f"{stats.file} line {row.line}: {self.column}"
        items = read_list(cell, place)
        if items is None:
            text = cell.strip()
            if not text:
                return [] if self.separator else None
            if (text.startswith('"') and text.endswith('"')) or is_literal(text):
                raise UsageError(
                    f"{place} is in quotes: {quoted(text)}; write it without quotes, or save a .tsv table as .csv"
                )
            if is_missing(text) and text not in self.labels:
                stats.count_irregular(f"with the label {text!r}, missing unless config.data.labels lists it", row.line)
                return None
            parts = text.split(self.separator) if self.separator else [text]
            items = [part.strip() for part in parts if part.strip()]
        elif not self.separator:
            raise UsageError(
                f"{place} is a list: {quoted(cell)}; for several labels per row, set --config.data.kind=multilabel, "
                "and for one tag per word, use --config text:kind=tags"
            )
        for item in items:
            is_name = isinstance(item, (str, int)) or (isinstance(item, float) and item.is_integer())
            name = label_name(item) if is_name else ""
            if (is_missing(name) and name not in self.labels) or (self.separator and self.separator in name):
                raise UsageError(
                    f"{place}: {quoted(item)} is not a label; labels must not be empty or a missing value such as "
                    f"NaN, or contain config.data.label_separator={self.separator!r}"
                )
        return [label_name(item) for item in items]

    def read(self, row: Row, stats: ReadStats) -> Any:
        """Returns the label of a row as a value for `to_array`, or None if it is missing.

        In multi-label data, two or more zeros and ones are a multi-hot vector with one item per label, unless a label
        is named 0 or 1.
        """
        names, place = self.names(row, stats), f"{stats.file} line {row.line}: {self.column}"
        if names is None:
            return None
        if self.separator:
            if is_multi_hot(names) and not _BINARY_VALUES.keys() & {*map(label_key, self.labels)}:
                if len(names) != len(self.labels):
                    raise UsageError(
                        f"{place} has {len(names)} zeros and ones, but there are {len(self.labels)} "
                        f"labels: {listed(self.labels)}; write one zero or one per label"
                    )
                return [_BINARY_VALUES[label_key(name)] for name in names]
            ids = {self._class_id(name, place) for name in names}
            return [int(index in ids) for index in range(len(self.labels))]
        if self.labels:
            return self._class_id(names[0], place)
        with contextlib.suppress(ValueError):
            # Reject underscores, because Python reads 1_000 as 1000.
            if math.isfinite(number := float(names[0])) and "_" not in names[0]:
                return number
        raise UsageError(f"{place} is {quoted(names[0])}, not a number; correct the value")

    def _class_id(self, name: str, place: str) -> int:
        if name in self.labels:
            return self.labels.index(name)
        keys = [label_key(label) for label in self.labels]
        if label_key(name) in keys:
            return keys.index(label_key(name))
        raise UsageError(
            f"{place} is {quoted(name)}, which is not a label; use one of {listed(self.labels)}; for --config text, "
            "you may also name the labels in a JSON file and set --config.data.labels to it"
        )


def is_multi_hot(names: Sequence[str]) -> bool:
    """Returns True if the labels of a row are multi-hot (at least two, all 0 or 1), and not names."""
    return len(names) > 1 and all(label_key(name) in _BINARY_VALUES for name in names)


def encode_rows(
    rows: Iterable[Row],
    sequences: Sequence[Sequence[str]],
    target: Target,
    tokenizer: Tokenizer,
    seq_len: int,
    stats: ReadStats,
    *,
    labeled: bool,
    training: bool,
) -> Examples:
    """Tokenizes the rows of one file, truncates them to `seq_len` tokens, and updates `stats`.

    Each item of `sequences` lists the columns of one sequence. The first column is the sequence's first text. The other
    columns, joined with spaces, are its second text. `Target.to_array` describes the array `labels` of the examples. In
    a `labeled` file, training skips rows without a label. Evaluation predicts these rows but does not score them, so
    that predictions stay aligned with the rows of the file.
    """
    columns = dict.fromkeys(itertools.chain(*sequences))
    texts = dict.fromkeys(part for first, *second in sequences for part in ((first,), tuple(second)) if part)
    encoded, labels, lines = [], [], []
    for row in rows:
        label = target.read(row, stats) if labeled and not row.has_problem else None
        if labeled and label is None and not row.has_problem:
            if training:
                stats.skip(_UNLABELED, row.line)
                continue
            stats.count_irregular(f"{_UNLABELED}, predicted but not scored", row.line)
        for column in columns:
            if not isinstance(row.fields[column], str):
                raise UsageError(f"{stats.file} line {row.line}: {column} is a list; it must be a string")
            stats.count_irregular_text(row.fields[column], row.line)
        ids = {part: tokenizer.encode_with_special(" ".join(row.fields[name] for name in part)) for part in texts}
        if not all(ids.values()):
            stats.count_irregular("with an empty text", row.line)
        pairs = [(ids[(first,)], ids[tuple(second)] if second else None) for first, *second in sequences]
        room = tokenizer.vocabulary.room
        if any(len(a) + len(b or ()) > room(seq_len, 1 if b is None else 2) for a, b in pairs):
            stats.count_irregular(f"truncated to {seq_len} tokens", row.line)
        encoded += [encode_pair(first, second, seq_len, tokenizer.vocabulary) for first, second in pairs]
        labels.append(label)
        lines.append(row.line)
    stats.used = len(labels) - (labels.count(None) if labeled else 0)
    if not labels:
        raise UsageError(f"{stats.file} has no usable rows; use a file with at least one labeled row")
    return make_examples(encoded, {"labels": target.to_array(labels)}, len(sequences), lines)
