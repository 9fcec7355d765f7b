"""Per-class precision, recall, F1 and support, and the confusion matrix."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

# Name of the confusion matrix's extra row (spurious entities) and extra column (missed entities).
NO_ENTITY = "(none)"
# Maximum numbers of classes and of confusions to print, so that tables fit into a terminal.
_MAX_CLASSES, _MAX_CONFUSIONS = 20, 12
_NAME_WIDTH = 24


@dataclasses.dataclass(frozen=True)
class ClassReport:
    """Prediction counts by class."""

    classes: tuple[str, ...]  # names of the K classes
    correct: np.ndarray  # correct predictions of each class, int64 [K]
    predicted: np.ndarray  # all predictions of each class, int64 [K]
    support: np.ndarray  # labels of each class, int64 [K]
    # Confusion matrix with labels as rows and predictions as columns, int64 [M, M]. M is K, or K + 1 if the last row
    # and column are `NO_ENTITY`. None for multi-label data.
    confusion: np.ndarray | None = None
    scale: float = 1.0  # factor that multiplies precision, recall and F1: 1, or 100 for percent

    @property
    def confusion_names(self) -> tuple[str, ...]:
        """Names of the confusion matrix's rows and columns."""
        extra = 0 if self.confusion is None else len(self.confusion) - len(self.classes)
        return (*self.classes, *[NO_ENTITY] * extra)

    def scores(self) -> dict[str, dict[str, float]]:
        """Returns precision, recall, F1 and support by class. A quotient 0 / 0 counts as 0, as in scikit-learn."""
        precision, recall = _ratio(self.correct, self.predicted), _ratio(self.correct, self.support)
        f1 = _ratio(2 * self.correct, self.predicted + self.support)
        columns = {"precision": precision, "recall": recall, "f1": f1}
        return {
            name: {column: float(self.scale * values[index]) for column, values in columns.items()}
            | {"support": int(self.support[index])}
            for index, name in enumerate(self.classes)
        }

    def as_json(self) -> dict[str, Any]:
        """Returns a JSON object with the scores in `per_class` and the nonzero confusion counts in `confusion`."""
        content: dict[str, Any] = {"per_class": self.scores()}
        if self.confusion is not None:
            names = self.confusion_names
            content["confusion"] = {
                name: {names[j]: int(row[j]) for j in np.flatnonzero(row)}
                for name, row in zip(names, self.confusion, strict=True)
            }
        return content

    def format(self) -> str:
        """Formats scores and confusion matrix as text, limited to the most frequent classes and confusions."""
        scores = self.scores()
        shown = [self.classes[i] for i in sorted(np.argsort(-self.support, kind="stable")[:_MAX_CLASSES])]
        width = 2 + max(len(truncate_name(name)) for name in (*shown, *self.confusion_names[-1:]))
        digits = 4 if self.scale == 1 else 2
        lines = [f"{'':<{width}}{'precision':>10}{'recall':>10}{'f1':>10}{'support':>10}"]
        for name in shown:
            *fractions, support = scores[name].values()
            cells = "".join(f"{fraction:>10.{digits}f}" for fraction in fractions)
            lines.append(f"{truncate_name(name):<{width}}{cells}{support:>10,}")
        if len(shown) < len(self.classes):
            rarer = len(self.classes) - len(shown)
            lines.append(f"{rarer:,} rarer classes are not shown; results.json lists all classes")
        if self.confusion is None:
            return "\n".join(lines)
        if len(self.confusion) > _MAX_CLASSES:
            return "\n".join([*lines, *self._frequent_confusions(self.confusion)])
        columns = [truncate_name(name, 10) for name in self.confusion_names]
        cell = 2 + max(max(map(len, columns)), len(f"{self.confusion.max(initial=0):,}"))
        lines.append(f"{'label / predicted':<{max(width, 18)}}" + "".join(f"{name:>{cell}}" for name in columns))
        for name, row in zip(self.confusion_names, self.confusion, strict=True):
            lines.append(f"{truncate_name(name):<{max(width, 18)}}" + "".join(f"{count:>{cell},}" for count in row))
        return "\n".join(lines)

    def _frequent_confusions(self, confusion: np.ndarray) -> list[str]:
        names, errors = self.confusion_names, confusion - np.diag(np.diag(confusion))
        order = np.argsort(-errors, axis=None, kind="stable")[:_MAX_CONFUSIONS]
        pairs = [divmod(int(index), len(names)) for index in order if errors.flat[index]]
        return ["most frequent confusions:"] + [
            f"  {truncate_name(names[i])} predicted as {truncate_name(names[j])}: {errors[i, j]:,}" for i, j in pairs
        ]


def class_report(classes: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> ClassReport:
    """Builds the report of single-label data. `predictions` and `labels` are class ids [N]."""
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(confusion, (labels, predictions), 1)
    return ClassReport(tuple(classes), np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1), confusion)


def multilabel_report(classes: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> ClassReport:
    """Builds the report of multi-label data. `predictions` and `labels` are 0/1 arrays [N, K]."""
    correct = (predictions & labels).sum(axis=0)
    return ClassReport(tuple(classes), correct, predictions.sum(axis=0), labels.sum(axis=0))


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)


def truncate_name(name: str, width: int = _NAME_WIDTH) -> str:
    """Truncates a class name to a column width and escapes control characters."""
    printable = "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)
    return printable if len(printable) <= width else printable[: width - 3] + "..."


def log_reports(reports: Mapping[str, ClassReport]) -> None:
    """Logs the class report of each evaluation set, keyed by the suffix of its metric names, such as `_mismatched`."""
    for suffix, report in reports.items():
        logger.info(f"metrics by class{suffix.replace('_', ' ')}:\n{report.format()}")
