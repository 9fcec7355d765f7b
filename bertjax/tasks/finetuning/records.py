"""What a model says of an example, as an object of JSON: a prediction, and how sure of it the model is."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bertjax.data.finetuning.tables import Row

Record = dict[str, Any]
# The file they are written to, where the task does not write several.
RECORDS = "predictions.jsonl"
# Of the records of a file with columns; a column with such a name cannot stand beside them.
FIELDS = ("line", "prediction", "probabilities", "logits", "words")
_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class FileRecords:
    """The records of one file of examples.

    Attributes:
      name: of the file they are written to.
      of: (outputs of the evaluation batches, whether with logits) to a record of each example, in order.
      lines: of the file, one for each example, rising; () where an example has none.
      table: columns to all rows of the file; None where it has no columns.
    """

    name: str
    of: Callable[[list[dict[str, np.ndarray]], bool], Iterable[Record]]
    lines: Sequence[int] = ()
    table: Callable[[Sequence[str]], Iterator[Row]] | None = None


def of_class(labels: Sequence[str], logits: np.ndarray, with_logits: bool) -> Record:
    """One of several classes, float32 [classes]."""
    record = {"prediction": labels[int(logits.argmax())], "probabilities": _named(labels, softmax(logits))}
    return {**record, "logits": _named(labels, logits)} if with_logits else record


def of_labels(labels: Sequence[str], logits: np.ndarray, threshold: float, with_logits: bool) -> Record:
    """Those of several labels whose probability is at least a threshold, float32 [labels]."""
    told = [label for label, there in zip(labels, are_given(logits, threshold), strict=True) if there]
    probabilities = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    record = {"prediction": told, "probabilities": _named(labels, probabilities)}
    return {**record, "logits": _named(labels, logits)} if with_logits else record


def are_given(logits: np.ndarray, threshold: float) -> np.ndarray:
    """Of which labels the probability, the logistic function of the logit, is at least a threshold: bool."""
    return logits >= np.log(threshold / (1 - threshold))


def of_number(value: np.ndarray) -> Record:
    """A number, float32 []."""
    return {"prediction": short(value)}


def of_choice(logits: np.ndarray, with_logits: bool) -> Record:
    """One of several choices, float32 [choices], by its place."""
    record = {"prediction": int(logits.argmax()), "probabilities": [short(p) for p in softmax(logits)]}
    return {**record, "logits": [short(logit) for logit in logits]} if with_logits else record


def of_sentence(words: Sequence[str], labels: Sequence[str], logits: np.ndarray, with_logits: bool) -> Record:
    """A tag for each word, float32 [words, tags]."""
    record = {
        "words": list(words),
        "prediction": [labels[tag] for tag in logits.argmax(axis=-1)] if len(words) else [],
        "probabilities": [_named(labels, row) for row in softmax(logits)] if len(words) else [],
    }
    return {**record, "logits": [_named(labels, row) for row in logits]} if with_logits else record


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities over the last axis."""
    weights = np.exp(np.asarray(logits, np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def _named(labels: Sequence[str], values: np.ndarray) -> dict[str, float]:
    return {label: short(value) for label, value in zip(labels, values, strict=True)}


def short(value: float | np.ndarray) -> float:
    """A number with as many digits as float32 has to tell."""
    return float(f"{float(value):.{_DIGITS}g}")
