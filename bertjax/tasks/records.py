"""Prediction records: JSON objects with the prediction and the probabilities of an example."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.data.finetuning.tables import Row
from bertjax.metrics.entities import extract_entities

Record = dict[str, Any]
# File name of the prediction records, for tasks that predict one input file.
RECORDS_FILE = "predictions.jsonl"
# Fields of a record. Input columns with these names cannot be copied to the records.
FIELDS = ("line", "prediction", "probabilities", "logits", "words")
_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class PredictionRecords:
    """Specification of the prediction records of one input file.

    Attributes:
      file_name: name of the JSON Lines file to write.
      make: function that converts the outputs of all evaluation batches to one record per example, in input order. Its
        second argument determines whether records contain logits.
      lines: line number of each example in the input file, ascending (default: (), no line numbers).
      read_columns: function that reads columns of the input file by name (default: None, the file has no columns).
    """

    file_name: str
    make: Callable[[list[dict[str, np.ndarray]], bool], Iterable[Record]]
    lines: Sequence[int] = ()
    read_columns: Callable[[Sequence[str]], Iterator[Row]] | None = None


def class_record(labels: Sequence[str], logits: np.ndarray, include_logits: bool) -> Record:
    """Returns the prediction record of the most probable class. `logits` is float32 [classes]."""
    record = {"prediction": labels[int(logits.argmax())], "probabilities": _by_label(labels, softmax(logits))}
    return {**record, "logits": _by_label(labels, logits)} if include_logits else record


def multilabel_record(labels: Sequence[str], logits: np.ndarray, threshold: float, include_logits: bool) -> Record:
    """Returns a record that predicts all labels with probability >= `threshold`. `logits` is float32 [labels]."""
    predicted = list(itertools.compress(labels, reaches_threshold(logits, threshold)))
    probabilities = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    record = {"prediction": predicted, "probabilities": _by_label(labels, probabilities)}
    return {**record, "logits": _by_label(labels, logits)} if include_logits else record


def reaches_threshold(logits: np.ndarray, threshold: float) -> np.ndarray:
    """Returns a bool mask of the logits whose sigmoid is at least `threshold`."""
    return logits >= np.log(threshold / (1 - threshold))


def number_record(value: np.ndarray) -> Record:
    """Returns the prediction record of one regression output."""
    return {"prediction": round_digits(value)}


def choice_record(logits: np.ndarray, include_logits: bool) -> Record:
    """Returns the prediction record with the index of the best choice. `logits` is float32 [choices]."""
    record = {"prediction": int(logits.argmax()), "probabilities": [round_digits(p) for p in softmax(logits)]}
    return {**record, "logits": [round_digits(logit) for logit in logits]} if include_logits else record


def tags_record(
    words: Sequence[str], labels: Sequence[str], rows: Sequence[np.ndarray], include_logits: bool
) -> Record:
    """Returns the prediction record of a sentence's tags. `rows` has the logits of each word, float32 [tags]."""
    record = {
        "words": list(words),
        "prediction": [labels[int(row.argmax())] for row in rows],
        "probabilities": [_by_label(labels, softmax(row)) for row in rows],
    }
    return {**record, "logits": [_by_label(labels, row) for row in rows]} if include_logits else record


def entity_records(text: str, spans: Sequence[tuple[int, int]], tags: Sequence[str]) -> list[Record]:
    """Returns the entities of a text in order: label, character offsets of start and end (exclusive), and text.

    `spans` contains the character offsets of each word, and `tags` the tag of each word in IOB, BIOES, BILOU or BMES.
    """
    return [
        {"label": label, "start": start, "end": end, "text": text[start:end]}
        for first, last, label in sorted(extract_entities(tags))
        for start, end in [(spans[first][0], spans[last - 1][1])]
    ]


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the softmax over the last axis, float64."""
    weights = np.exp(np.asarray(logits, np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def round_digits(value: float | np.ndarray) -> float:
    """Rounds a value of a record to six significant digits, which float32 always preserves."""
    return float(f"{float(value):.{_DIGITS}g}")


def _by_label(labels: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return {label: round_digits(value) for label, value in zip(labels, values, strict=True)}
