"""Tokenization of table rows with one or two texts and a label."""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.errors import UsageError, listed, quoted

_UNLABELED = "with an empty label"


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
        """
        if self.separator:
            names = read_labels(row, self.column, self.separator, stats)
            ids = {self._class_id(name, row, stats) for name in names}
            return [int(index in ids) for index in range(len(self.labels))]
        label = read_label(row, self.column, stats)
        if not label:
            return None
        return self._class_id(label, row, stats) if self.labels else self._number(label, row, stats)

    def _class_id(self, name: str, row: Row, stats: ReadStats) -> int:
        try:
            return self.labels.index(name)
        except ValueError:
            place = f"{stats.file} line {row.line}: {self.column}"
            raise UsageError(
                f"{place} is {quoted(name)}, which is not a label; use one of {listed(self.labels)}"
            ) from None

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


def read_label(row: Row, column: str, stats: ReadStats) -> str:
    """Returns the label of a row without surrounding whitespace. The label may be empty."""
    label = row.fields[column]
    if not isinstance(label, str):
        raise UsageError(f"{stats.file} line {row.line}: {column} is a list; it must be one label")
    return label.strip()


def read_labels(row: Row, column: str, separator: str, stats: ReadStats) -> list[str]:
    """Returns the labels of a multi-label row. The column contains a JSON list or a string with separators."""
    value = row.fields[column]
    if isinstance(value, str):
        return [label.strip() for label in value.split(separator) if label.strip()]
    for item in value:
        if not isinstance(item, (str, int, float)) or separator in str(item) or not str(item).strip():
            raise UsageError(
                f"{stats.file} line {row.line}: {quoted(item)} in {column} is not a label; a label must be a nonempty "
                f"string that does not contain config.data.label_separator={separator!r}"
            )
    return [str(item).strip() for item in value]
