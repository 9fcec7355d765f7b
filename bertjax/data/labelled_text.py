"""Rows of one or two texts and a label to examples; what is odd about a row is counted with its file and line."""

from collections.abc import Iterable, Sequence

import numpy as np

from bertjax.corpus.tokenizer import Tokenizer
from bertjax.data.examples import Examples, encode_pair, make_examples
from bertjax.data.tables import Reading, Row
from bertjax.errors import UsageError

_UNLABELLED = "with an empty label"


def encode_rows(
    rows: Iterable[Row],
    texts: Sequence[str],
    label: str | None,
    labels: Sequence[str],
    tokenizer: Tokenizer,
    seq_len: int,
    reading: Reading,
) -> Examples:
    """Encodes all rows.

    Args:
      rows: of one file.
      texts: the one or two columns with text.
      label: the column with the label; None where there are no labels.
      labels: names of the classes, the index is the id; () reads numbers.
      tokenizer, seq_len: of the model; what is longer is cut.
      reading: gains `used`, notes of empty and of cut texts, and counts of rows skipped for want of a label.

    Returns:
      Examples with `labels`: int32, -1 where unknown, or float32, NaN where unknown.

    Raises:
      UsageError: a label is none of the classes, or not a number; or there are no rows.
    """
    vocabulary = tokenizer.vocabulary
    sequences, found, lines = [], [], []
    special = 1 + len(texts)
    for row in rows:
        wanted = label_of(row, label, reading) if label else ""
        if label and not wanted:
            reading.skip(_UNLABELLED, row.line)
            continue
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
        lines.append(row.line)
        if label:
            found.append(_label(wanted, labels, label, row.line, reading.file))
    reading.used = len(sequences)
    if not sequences:
        raise UsageError(f"{reading.file} has no rows that can be used")
    if not label:
        found = [-1 if labels else np.nan] * len(sequences)
    return make_examples(sequences, {"labels": np.array(found, np.int32 if labels else np.float32)}, lines=lines)


def label_of(row: Row, column: str, reading: Reading) -> str:
    """The label of a row, without blanks around it; "" where there is none.

    Raises:
      UsageError: it is a list.
    """
    label = row.fields[column]
    if not isinstance(label, str):
        raise UsageError(f"{reading.file} line {row.line}: {column} is a list, not a label")
    return label.strip()


def _label(value: str, labels: Sequence[str], column: str, line: int, file: str) -> int | float:
    if labels:
        try:
            return labels.index(value)
        except ValueError:
            known = ", ".join(labels)
            raise UsageError(f"{file} line {line}: {column} is {value!r}; known labels: {known}") from None
    try:
        number = float(value)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise UsageError(f"{file} line {line}: {column} is {value!r}, not a number")
    return number
