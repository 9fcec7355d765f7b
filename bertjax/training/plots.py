"""Plots of a run: training and evaluation metrics, and confusion matrices."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from bertjax.metrics.report import ClassReport, truncate_name
from bertjax.utils.io import atomic_file

# Prefix of evaluation metrics in `metrics.jsonl`.
HELD_OUT = "eval_"
# Maximum numbers of classes for which a confusion matrix shows legible names and counts.
_MAX_NAMED_CLASSES, _MAX_COUNTED_CLASSES = 60, 25


def plot_curves(lines: list[dict[str, Any]], path: epath.Path, score: str) -> None:
    """Plots losses and scores against tokens seen, with thin lines for training and thick lines for evaluation.

    Args:
      lines: objects of `metrics.jsonl`. Objects without `tokens` are skipped.
      path: PNG file, written atomically.
      score: metric of the right panel. If empty, the panel shows all accuracies.
    """
    # The import takes half a second. A Figure without pyplot needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2))
    # Use fixed margins, because automatic layout would double the time of a plot.
    figure.subplots_adjust(left=0.06, right=0.985, bottom=0.12, top=0.93, wspace=0.16)
    for axes, (title, names) in zip(figure.subplots(1, 2), _panels(lines, score), strict=True):
        for index, name in enumerate(names):
            for key, width, label in (
                (name, 0.8, f"{name}, training"),
                (f"{HELD_OUT}{name}", 2.2, f"{name}, held out"),
            ):
                shown = [line for line in lines if "tokens" in line and isinstance(line.get(key), float)]
                points = [(line["tokens"] / 1e6, line[key]) for line in shown]
                if points:
                    axes.plot(*zip(*points, strict=True), f"C{index}", linewidth=width, label=label)
        axes.set(title=title, xlabel="million tokens seen")
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=8)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def _panels(lines: list[dict[str, Any]], score: str) -> list[tuple[str, list[str]]]:
    """Returns the title and metric names of each panel."""
    names = list(dict.fromkeys(name.removeprefix(HELD_OUT) for line in lines for name in line))
    losses = [name for name in names if name == "loss" or name.endswith("_loss")]
    if score:
        return [("Loss", losses), (score.replace("_", " "), [score])]
    return [("Loss", losses), ("Accuracy", [name for name in names if name.endswith("_accuracy")])]


def plot_confusion(reports: Mapping[str, ClassReport], path: epath.Path) -> None:
    """Plots a confusion matrix for each evaluation set. Colors show counts as fractions of each label's total.

    Args:
      reports: reports with confusion matrices, by panel title.
      path: PNG file, written atomically.
    """
    from matplotlib.figure import Figure

    count = max(len(report.confusion_names) for report in reports.values())
    side = float(np.clip(2.5 + 0.45 * count, 4, 14))
    figure = Figure(figsize=(side * len(reports), side), layout="constrained")
    for axes, (name, report) in zip(figure.subplots(1, len(reports), squeeze=False)[0], reports.items(), strict=True):
        matrix, names = report.confusion, [_label(label) for label in report.confusion_names]
        shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set(title=name.strip("_"), xlabel="predicted", ylabel="label")
        if len(names) <= _MAX_NAMED_CLASSES:
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
        if len(names) <= _MAX_COUNTED_CLASSES:
            for i, j in zip(*np.nonzero(matrix), strict=True):
                color = "white" if shares[i, j] > 0.5 else "black"
                axes.text(j, i, f"{matrix[i, j]:,}", ha="center", va="center", color=color, fontsize=8)
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def _label(name: str) -> str:
    # Escape dollar signs, because matplotlib reads text between them as a formula.
    return truncate_name(name).replace("$", r"\$")
