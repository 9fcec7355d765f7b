"""Tokenization of table rows with one or two texts and a label."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.cells import is_missing, label_key, label_name, read_list
from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.errors import UsageError, listed, quoted

_UNLABELED = "with an empty label"
_IDS_OF_HOT = {"0": 0, "1": 1, "false": 0, "true": 1}


@dataclasses.dataclass(frozen=True)
class Target:
    """Label column of a table.

    Attributes:
      column: name of the column.
      labels: class names in the order of their ids; empty for regression.
      separator: separator of the labels in a multi-label column (default: "", exactly one label per row).
    """

    column: str
    labels: Sequence[str]
    separator: str = ""

    def to_array(self, values: Sequence[Any]) -> np.ndarray:
        """Converts the labels of N rows, as returned by `read`, to an array.

        Returns:
          Class ids, int32 [N]. For multi-label data, zeros and ones, int32 [N, K]. For regression, float32 [N]. Missing
          labels are -1, or NaN for regression.
        """
        missing = [-1] * len(self.labels) if self.separator else -1 if self.labels else np.nan
        values = [missing if value is None else value for value in values]
        return np.array(values, np.int32 if self.labels else np.float32)

    def read(self, row: Row, stats: ReadStats) -> Any:
        """Returns the label of a row as a value for `to_array`.

        Returns None if the label is missing. In multi-label data, an empty field is not missing: it means no labels.
        Several zeros and ones are multi-hot, with one item per label, unless a label has the name 0 or 1.
        """
        if self.separator:
            names = read_labels(row, self.column, self.separator, stats, self.labels)
            if names is None:
                return None
            if is_multi_hot(names) and not _IDS_OF_HOT.keys() & {*map(label_key, self.labels)}:
                if len(names) != len(self.labels):
                    raise UsageError(
                        f"{stats.file} line {row.line}: {self.column} has {len(names)} zeros and ones, but there are "
                        f"{len(self.labels)} labels: {listed(self.labels)}; write one zero or one per label"
                    )
                return [_IDS_OF_HOT[label_key(name)] for name in names]
            ids = {self._class_id(name, row, stats) for name in names}
            return [int(index in ids) for index in range(len(self.labels))]
        label = read_label(row, self.column, stats, self.labels)
        if not label:
            return None
        return self._class_id(label, row, stats) if self.labels else self._number(label, row, stats)

    def _class_id(self, name: str, row: Row, stats: ReadStats) -> int:
        if name in self.labels:
            return self.labels.index(name)
        keys = [label_key(label) for label in self.labels]
        if label_key(name) in keys:
            return keys.index(label_key(name))
        place = f"{stats.file} line {row.line}: {self.column}"
        raise UsageError(
            f"{place} is {quoted(name)}, which is not a label; use one of {listed(self.labels)}, or name the labels in "
            "a JSON file and set --config.data.labels to it"
        )

    def _number(self, text: str, row: Row, stats: ReadStats) -> float:
        with contextlib.suppress(ValueError):
            if math.isfinite(number := float(text)):
                return number
        place = f"{stats.file} line {row.line}: {self.column}"
        raise UsageError(f"{place} is {quoted(text)}, not a number; correct the value")


def encode_rows(
    rows: Iterable[Row],
    texts: Sequence[str],
    target: Target,
    tokenizer: Tokenizer,
    seq_len: int,
    stats: ReadStats,
    *,
    labeled: bool,
    training: bool,
) -> Examples:
    """Tokenizes the rows of one file, and updates `stats`.

    `texts` contains the names of one or two text columns. Examples are truncated to `seq_len` tokens and have an array
    `labels`, see `Target.to_array`. `labeled` says whether the file has labels. In training, rows without a label are
    skipped. In evaluation and prediction, such rows are predicted but not scored, so that predictions stay aligned
    with the rows of the file.
    """
    vocabulary = tokenizer.vocabulary
    sequences, labels, lines = [], [], []
    special_tokens = 1 + len(texts)
    for row in rows:
        label = target.read(row, stats) if labeled and not row.is_short else None
        if labeled and label is None and not row.is_short:
            if training:
                stats.skip(_UNLABELED, row.line)
                continue
            stats.count_irregular(f"{_UNLABELED}, predicted but not scored", row.line)
        for column in texts:
            if not isinstance(row.fields[column], str):
                raise UsageError(f"{stats.file} line {row.line}: {column} is a list; it must be a string")
        ids = [tokenizer.encode_with_special(row.fields[column]) for column in texts]
        if not all(ids):
            stats.count_irregular("with an empty text", row.line)
        if sum(map(len, ids)) + special_tokens > seq_len:
            stats.count_irregular(f"truncated to {seq_len} tokens", row.line)
        second = ids[1] if len(ids) > 1 else None
        sequences.append(encode_pair(ids[0], second, seq_len, vocabulary))
        labels.append(label)
        lines.append(row.line)
    stats.used = len(sequences) - (labels.count(None) if labeled else 0)
    if not sequences:
        raise UsageError(f"{stats.file} has no usable rows; use a file with at least one labeled row")
    return make_examples(sequences, {"labels": target.to_array(labels)}, lines=lines)


def read_label(row: Row, column: str, stats: ReadStats, labels: Sequence[str] = ()) -> str:
    """Returns the label of a row, or "" if it is missing.

    A cell such as NaN or None means "missing" and is counted in `stats`, unless it is one of `labels`.
    """
    place = f"{stats.file} line {row.line}: {column}"
    if _read_list(row, column, place) is not None:
        raise UsageError(
            f"{place} is a list: {quoted(row.fields[column])}; for several labels per row, set "
            "--config.data.kind=multilabel, and for one tag per word, use --config text:kind=tags"
        )
    return _present(row.fields[column].strip(), labels, row, stats)


def read_labels(
    row: Row, column: str, separator: str, stats: ReadStats, labels: Sequence[str] = ()
) -> list[str] | None:
    """Returns the labels of a multi-label row, or None if they are missing.

    The column contains a list, or a string with separators. Missing labels are treated as in `read_label`.
    """
    place = f"{stats.file} line {row.line}: {column}"
    items = _read_list(row, column, place)
    if items is None:
        value = row.fields[column].strip()
        if value and not _present(value, labels, row, stats):
            return None
        items = [label.strip() for label in value.split(separator) if label.strip()]
    for item in items:
        is_name = isinstance(item, (str, int)) or (isinstance(item, float) and item.is_integer())
        name = label_name(item) if is_name else ""
        if separator in name or (is_missing(name) and name not in labels):
            raise UsageError(
                f"{stats.file} line {row.line}: {quoted(item)} in {column} is not a label; a label must be a string "
                f"that is not empty or missing and does not contain config.data.label_separator={separator!r}"
            )
    return [label_name(item) for item in items]


def is_multi_hot(names: Sequence[str]) -> bool:
    """Returns True if the labels of a row are several zeros and ones, rather than names."""
    return len(names) > 1 and all(label_key(name) in _IDS_OF_HOT for name in names)


def _read_list(row: Row, column: str, place: str) -> list[Any] | None:
    try:
        return read_list(row.fields[column])
    except ValueError as error:
        raise UsageError(
            f'{place} is {quoted(row.fields[column])}, {error}; write a list such as ["a", "b"], or a label '
            "without brackets"
        ) from error


def _present(label: str, labels: Sequence[str], row: Row, stats: ReadStats) -> str:
    """Returns the label, or "" if it means "missing"."""
    if label and is_missing(label) and label not in labels:
        stats.count_irregular(f"with the label {label!r}, missing unless config.data.labels has it", row.line)
        return ""
    return label
