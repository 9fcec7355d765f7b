"""What became of each class: precision, recall, F1 and support, and what is taken for what."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from bertjax.metrics.entities import chunks

# Of entities: what is there and was not found with these ends, or was found and is not there.
NO_ENTITY = "(none)"
# More do not fit a terminal.
_SHOWN_CLASSES, _SHOWN_CONFUSIONS = 20, 12
_NAME_WIDTH = 24


@dataclasses.dataclass(frozen=True)
class ClassReport:
    """Counts of predictions, from which all else follows.

    Attributes:
      classes: their names.
      right, predicted, support: int64 [K], how often each was predicted rightly, was predicted, and is the label.
      confusion: int64 [M, M], rows are labels, columns predictions; M is K, or K + 1 where the last is no class at all.
        None where a row may have several labels.
      scale: 1, or 100 where the metrics beside it are in percent.
    """

    classes: tuple[str, ...]
    right: np.ndarray
    predicted: np.ndarray
    support: np.ndarray
    confusion: np.ndarray | None = None
    scale: float = 1.0

    @property
    def confusion_names(self) -> tuple[str, ...]:
        """What the rows and columns of the confusion matrix are."""
        extra = 0 if self.confusion is None else len(self.confusion) - len(self.classes)
        return (*self.classes, *[NO_ENTITY] * extra)

    def measures(self) -> dict[str, dict[str, float]]:
        """Precision, recall, F1 and support by class; what would be 0 / 0 is 0, as in scikit-learn."""
        precision, recall = _ratio(self.right, self.predicted), _ratio(self.right, self.support)
        f1 = _ratio(2 * self.right, self.predicted + self.support)
        columns = zip(self.classes, precision, recall, f1, self.support, strict=True)
        return {
            name: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
            for name, p, r, f, n in ((name, *(self.scale * x for x in (p, r, f)), n) for name, p, r, f, n in columns)
        }

    def as_json(self) -> dict[str, Any]:
        """`per_class`: the measures; `confusion`: label to prediction to how often, where that is not never."""
        content: dict[str, Any] = {"per_class": self.measures()}
        if self.confusion is not None:
            names = self.confusion_names
            content["confusion"] = {
                name: {names[j]: int(row[j]) for j in np.flatnonzero(row)}
                for name, row in zip(names, self.confusion, strict=True)
            }
        return content

    def text(self) -> str:
        """The measures and the confusion matrix, in lines; of many classes, the frequent ones and confusions."""
        measures = self.measures()
        shown = [self.classes[i] for i in sorted(np.argsort(-self.support, kind="stable")[:_SHOWN_CLASSES])]
        width = 2 + max(len(short(name)) for name in (*shown, *self.confusion_names[-1:]))
        digits = 4 if self.scale == 1 else 2
        lines = [f"{'':<{width}}{'precision':>10}{'recall':>10}{'f1':>10}{'support':>10}"]
        for name in shown:
            *numbers, support = measures[name].values()
            cells = "".join(f"{number:>10.{digits}f}" for number in numbers)
            lines.append(f"{short(name):<{width}}{cells}{support:>10,}")
        if len(shown) < len(self.classes):
            lines.append(f"and {len(self.classes) - len(shown):,} classes that are rarer; all are in results.json")
        if self.confusion is None:
            return "\n".join(lines)
        if len(self.confusion) > _SHOWN_CLASSES:
            return "\n".join([*lines, *self._frequent_confusions()])
        columns = [short(name, 10) for name in self.confusion_names]
        cell = 2 + max(max(map(len, columns)), len(f"{self.confusion.max(initial=0):,}"))
        lines.append(f"{'label, predicted:':<{max(width, 18)}}" + "".join(f"{name:>{cell}}" for name in columns))
        for name, row in zip(self.confusion_names, self.confusion, strict=True):
            lines.append(f"{short(name):<{max(width, 18)}}" + "".join(f"{count:>{cell},}" for count in row))
        return "\n".join(lines)

    def _frequent_confusions(self) -> list[str]:
        names, wrong = self.confusion_names, self.confusion - np.diag(np.diag(self.confusion))
        order = np.argsort(-wrong, axis=None, kind="stable")[:_SHOWN_CONFUSIONS]
        pairs = [divmod(int(place), len(names)) for place in order if wrong.flat[place]]
        return ["most often taken for another:"] + [
            f"  {short(names[i])} for {short(names[j])}: {wrong[i, j]:,}" for i, j in pairs
        ]


def of_classes(classes: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> ClassReport:
    """Of one class a row; both int [N]."""
    confusion = np.zeros((len(classes), len(classes)), np.int64)
    np.add.at(confusion, (labels, predictions), 1)
    return ClassReport(tuple(classes), np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1), confusion)


def of_labels(classes: Sequence[str], predictions: np.ndarray, labels: np.ndarray) -> ClassReport:
    """Of any number of labels a row; both [N, K] of 0 and 1."""
    counts = ((predictions & labels).sum(axis=0), predictions.sum(axis=0), labels.sum(axis=0))
    return ClassReport(tuple(classes), *counts)


def of_entities(wanted: Iterable[Sequence[str]], predicted: Iterable[Sequence[str]]) -> ClassReport:
    """Of entity types, in percent: an entity is taken for the one with the same ends, or for none.

    Args:
      wanted, predicted: tags of the words of each sentence.
    """
    pairs = []
    for sentence, guess in zip(wanted, predicted, strict=True):
        there, given = ({(a, b): kind for a, b, kind in chunks(tags)} for tags in (sentence, guess))
        pairs += [(there.get(ends, NO_ENTITY), given.get(ends, NO_ENTITY)) for ends in there.keys() | given.keys()]
    types = sorted({kind for pair in pairs for kind in pair} - {NO_ENTITY})
    names = [*types, NO_ENTITY]
    confusion = np.zeros((len(names), len(names)), np.int64)
    for label, prediction in pairs:
        confusion[names.index(label), names.index(prediction)] += 1
    counts = (np.diag(confusion), confusion.sum(axis=0), confusion.sum(axis=1))
    return ClassReport(tuple(types), *(count[:-1] for count in counts), confusion, scale=100.0)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)


def short(name: str, width: int = _NAME_WIDTH) -> str:
    """A name that fits a column, on one line and without what a terminal would obey."""
    shown = "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)
    return shown if len(shown) <= width else shown[: width - 3] + "..."
