"""Confusion matrices as a picture."""

from collections.abc import Mapping

import numpy as np
from etils import epath

from bertjax.metrics.report import ClassReport, truncate_name
from bertjax.utils.io import atomic_file

# Of more classes, names and counts could not be read.
_NAMED, _COUNTED = 60, 25


def draw_confusion(reports: Mapping[str, ClassReport], path: epath.Path) -> None:
    """Draws a panel for each evaluation set: shares of each label's rows, with the counts where there is room.

    Args:
      reports: with a confusion matrix, by what the panel is called beside "label" and "predicted".
      path: of the PNG file, replaced at once when the picture is complete.
    """
    # Imported here: it takes half a second, and the figure needs no screen.
    from matplotlib.figure import Figure

    count = max(len(report.confusion_names) for report in reports.values())
    side = float(np.clip(2.5 + 0.45 * count, 4, 14))
    figure = Figure(figsize=(side * len(reports), side), layout="constrained")
    for axes, (name, report) in zip(figure.subplots(1, len(reports), squeeze=False)[0], reports.items(), strict=True):
        matrix, names = report.confusion, [_label(label) for label in report.confusion_names]
        shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set(title=name.strip("_"), xlabel="predicted", ylabel="label")
        if len(names) <= _NAMED:
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
        if len(names) <= _COUNTED:
            for i, j in zip(*np.nonzero(matrix), strict=True):
                color = "white" if shares[i, j] > 0.5 else "black"
                axes.text(j, i, f"{matrix[i, j]:,}", ha="center", va="center", color=color, fontsize=8)
    with atomic_file(path) as here, open(here, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def _label(name: str) -> str:
    # A dollar sign would begin a formula.
    return truncate_name(name).replace("$", r"\$")
