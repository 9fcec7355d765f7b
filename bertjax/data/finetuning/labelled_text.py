"""Rows of one or two texts and a label to examples; what is odd about a row is counted with its file and line."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.finetuning.examples import Examples, encode_pair, make_examples
from bertjax.data.finetuning.tables import ReadStats, Row
from bertjax.errors import UsageError, listed, quoted

_UNLABELLED = "with an empty label"


@dataclasses.dataclass(frozen=True)
class Target:
    """What is told of each row.

    Attributes:
      column: with the label.
      labels: names of the classes, the index is the id; () reads numbers.
      separator: between the labels of a row that may have any number of them, where it has no list; "" is one label.
    """

    column: str
    labels: Sequence[str]
    separator: str = ""

    def array(self, values: Sequence[Any]) -> np.ndarray:
        """int32 [N], -1 where unknown; with a separator int32 [N, K]; of numbers float32 [N], NaN where unknown."""
        values = [self._unknown if value is None else value for value in values]
        return np.array(values, np.int32 if self.labels else np.float32)

    @property
    def _unknown(self) -> Any:
        return [-1] * len(self.labels) if self.separator else -1 if self.labels else np.nan

    def read(self, row: Row, reading: ReadStats) -> Any:
        """The label of a row, in numbers; None where it has none.

        Raises:
          UsageError: a label is none of the classes, or not a number.
        """
        if self.separator:
            found = labels_of(row, self.column, self.separator, reading)
            ids = {_id(label, self.labels, self.column, row.line, reading.file) for label in found}
            return [int(index in ids) for index in range(len(self.labels))]
        label = label_of(row, self.column, reading)
        if not label:
            return None
        if self.labels:
            return _id(label, self.labels, self.column, row.line, reading.file)
        return _number(label, self.column, row.line, reading.file)


def encode_rows(
    rows: Iterable[Row],
    texts: Sequence[str],
    target: Target,
    tokenizer: Tokenizer,
    seq_len: int,
    reading: ReadStats,
    *,
    labelled: bool,
    training: bool,
) -> Examples:
    """Encodes all rows.

    Args:
      rows: of one file.
      texts: the one or two columns with text.
      target: what is told of them.
      tokenizer, seq_len: of the model; what is longer is cut.
      reading: gains `used`, notes of empty and of cut texts, and counts of rows without a label.
      labelled: whether the rows have labels.
      training: rows without a label are left out; else they are kept, those that are short too, so that predictions
        stay beside their rows, and not scored.

    Returns:
      Examples with `labels`, as `Target.array` has them.

    Raises:
      UsageError: a label is none of the classes, or not a number; or there are no rows.
    """
    vocabulary = tokenizer.vocabulary
    sequences, found, lines = [], [], []
    special = 1 + len(texts)
    for row in rows:
        wanted = target.read(row, reading) if labelled and not row.is_short else None
        if labelled and wanted is None and not row.is_short:
            if training:
                reading.skip(_UNLABELLED, row.line)
                continue
            reading.note(f"{_UNLABELLED}, predicted and not scored", row.line)
        for column in texts:
            if not isinstance(row.fields[column], str):
                raise UsageError(f"{reading.file} line {row.line}: {column} is a list, not a text")
        ids = [tokenizer.encode(row.fields[column]) for column in texts]
        if not all(ids):
            reading.note("with an empty text", row.line)
        if sum(map(len, ids)) + special > seq_len:
            reading.note(f"cut to {seq_len} tokens", row.line)
        second = ids[1] if len(ids) > 1 else None
        sequences.append(encode_pair(ids[0], second, seq_len, vocabulary.cls_id, vocabulary.sep_id))
        found.append(wanted)
        lines.append(row.line)
    reading.used = len(sequences) - (found.count(None) if labelled else 0)
    if not sequences:
        raise UsageError(f"{reading.file} has no rows that can be used")
    return make_examples(sequences, {"labels": target.array(found)}, lines=lines)


def label_of(row: Row, column: str, reading: ReadStats) -> str:
    """The label of a row, without blanks around it; "" where there is none.

    Raises:
      UsageError: it is a list.
    """
    label = row.fields[column]
    if not isinstance(label, str):
        raise UsageError(f"{reading.file} line {row.line}: {column} is a list, not a label")
    return label.strip()


def labels_of(row: Row, column: str, separator: str, reading: ReadStats) -> list[str]:
    """The labels of a row that may have any number of them: a list in JSON, else with a separator between them.

    Raises:
      UsageError: a list has what is no label in it.
    """
    value = row.fields[column]
    if isinstance(value, str):
        return [label.strip() for label in value.split(separator) if label.strip()]
    for item in value:
        if not isinstance(item, (str, int, float)) or separator in str(item) or not str(item).strip():
            raise UsageError(
                f"{reading.file} line {row.line}: {quoted(item)} in {column} is no label; labels are texts "
                f"without config.data.label_separator, {separator!r}, in them"
            )
    return [str(item).strip() for item in value]


def _id(value: str, labels: Sequence[str], column: str, line: int, file: str) -> int:
    try:
        return labels.index(value)
    except ValueError:
        raise UsageError(f"{file} line {line}: {column} is {quoted(value)}; known labels: {listed(labels)}") from None


def _number(value: str, column: str, line: int, file: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise UsageError(f"{file} line {line}: {column} is {quoted(value)}, not a number")
    return number
