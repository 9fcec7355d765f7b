"""Prediction records: JSON objects with the prediction and the probabilities of an example."""

import dataclasses
import itertools
import json
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
LOGIT_FIELDS = ("logits",)
_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class PredictionRecords:
    """Specification of the prediction records of one input file."""

    file_name: str  # name of the JSON Lines file to write
    # Function that converts the outputs of all evaluation batches to one record per example, in input order.
    make: Callable[[list[dict[str, np.ndarray]]], Iterable[Record]]
    lines: Sequence[int] = ()  # line number of each example in the input file, ascending (default: (), no line numbers)
    # Function that reads columns of the input file by name (default: None, the file has no columns).
    read_columns: Callable[[Sequence[str]], Iterator[Row]] | None = None
    logit_fields: Sequence[str] = LOGIT_FIELDS  # fields that are written only with `--logits`


def class_record(labels: Sequence[str], logits: np.ndarray) -> Record:
    """Returns the prediction record of the most probable class. `logits` is float32 [classes].

    For multiple choice, `labels` is empty, the prediction is an index, and probabilities and logits are lists.
    """
    best = int(logits.argmax())
    return _record(labels[best] if labels else best, labels, softmax(logits), logits)


def multilabel_record(labels: Sequence[str], logits: np.ndarray, threshold: float) -> Record:
    """Returns a record that predicts all labels with probability >= `threshold`. `logits` is float32 [labels]."""
    predicted = list(itertools.compress(labels, reaches_threshold(logits, threshold)))
    return _record(predicted, labels, 1 / (1 + np.exp(-np.asarray(logits, np.float64))), logits)


def reaches_threshold(logits: np.ndarray, threshold: float) -> np.ndarray:
    """Returns a bool mask of the logits whose sigmoid is at least `threshold`."""
    return logits >= np.log(threshold / (1 - threshold))


def tags_record(words: Sequence[str], labels: Sequence[str], rows: Sequence[np.ndarray]) -> Record:
    """Returns the prediction record of a sentence's tags. `rows` has the logits of each word, float32 [tags]."""
    records = [class_record(labels, row) for row in rows]
    fields = ("prediction", "probabilities", "logits")
    return {"words": list(words), **{name: [record[name] for record in records] for name in fields}}


def entity_records(text: str, spans: Sequence[tuple[int, int]], tags: Sequence[str]) -> list[Record]:
    """Returns the entities of a text from left to right: label, character offsets (end exclusive) and text.

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


def _record(prediction: Any, labels: Sequence[str], probabilities: np.ndarray, logits: np.ndarray) -> Record:
    def by_label(values: Iterable[Any]) -> dict[str, Any] | list[Any]:
        return dict(zip(labels, values, strict=True)) if labels else list(values)

    # Only `to_json` rounds the logits, because most records are written without them.
    return {
        "prediction": prediction,
        "probabilities": by_label(map(round_digits, probabilities)),
        "logits": by_label(logits),
    }


def without_fields(record: Record, names: Sequence[str]) -> Record:
    """Returns a record without some of its fields."""
    return {name: value for name, value in record.items() if name not in names}


def to_json(record: Record, ensure_ascii: bool = True) -> str:
    """Formats a record as a line of JSON, with logits rounded like probabilities."""
    return json.dumps(record, ensure_ascii=ensure_ascii, default=round_digits)
