"""Plots of a run: training and evaluation metrics, and confusion matrices."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from bertjax.metrics.report import ClassReport, truncate_name
from bertjax.tasks.task import Task
from bertjax.training.metrics import EVAL_PREFIX
from bertjax.utils.io import AnyPath, atomic_file

# Maximum numbers of classes for which a confusion matrix shows class names, and counts.
_MAX_NAMED_CLASSES, _MAX_COUNTED_CLASSES = 60, 25


def plot_curves(task: Task, lines: list[dict[str, Any]], path: epath.Path, baseline: Mapping[str, float]) -> None:
    """Plots the metrics of a run. `lines` are records of `metrics.jsonl`.

    Lines are thin for training, thick with markers for evaluations, and dashed for the baseline.

    In tasks with epochs, plots loss and metrics against epochs. The right panel shows the metric that selects the best
    checkpoint or, without it, the metrics that are not losses, if there are any.

    In pre-training, plots metrics against tokens seen: one panel per metric and evaluation task, with losses in the
    upper row. Records without `tokens` are skipped. Vertical lines mark the ends of training phases.
    """
    # Import here, because the import takes half a second. `Figure` without pyplot needs no display.
    from matplotlib.figure import Figure

    metrics, rows, phase_ends = task.objective.metrics, [], []
    if task.steps_per_epoch:
        selected = [task.best_metric] if task.best_metric else [metric for metric in metrics if not metric.is_loss]
        names = tuple(metric.name for metric in selected or metrics)
        rows.append({"loss": ("loss",), ", ".join(names).replace("_", " "): names})
        points, x_label = [(line["step"] / task.steps_per_epoch, line) for line in lines], "epochs"
    else:
        for is_loss in (True, False):
            shown = [metric for metric in metrics if metric.is_loss == is_loss]
            own = {metric.panel: (metric.name,) for metric in shown}
            others = {f"{each.panel}, {name}": (f"{name}_{each.name}",) for name in task.other_tasks for each in shown}
            rows.append({**own, **others})
        points, x_label = [(line["tokens"] / 1e6, line) for line in lines if "tokens" in line], "million tokens"
        after = [[x for x, line in points if line["step"] >= end] for end, _ in task.phase_schedule[:-1]]
        phase_ends = [min(xs) for xs in after if xs]
    columns = max(map(len, rows))
    width, height = 5.5 * columns, 3.8 * len(rows)
    figure = Figure(figsize=(width, height))
    # Use fixed margins in inches, because automatic layout would double the time to draw a plot.
    margins = {"left": 0.7 / width, "right": 1 - 0.2 / width, "bottom": 0.55 / height, "top": 1 - 0.35 / height}
    figure.subplots_adjust(**margins, wspace=0.15, hspace=0.18)
    grid = figure.subplots(len(rows), columns, squeeze=False, sharex=True)
    for axes in [axes for axes_row, row in zip(grid, rows, strict=True) for axes in axes_row[len(row) :]]:
        axes.remove()
    used = [axes for axes_row, row in zip(grid, rows, strict=True) for axes in axes_row[: len(row)]]
    for axes, (title, names) in zip(used, [panel for row in rows for panel in row.items()], strict=True):
        for index, name in enumerate(names):
            prefix = f"{name}, " if len(names) > 1 else ""
            styles = {"linewidth": 0.8}, {"linewidth": 2.2, "marker": "o", "markersize": 4}
            for key, label, style in zip((name, f"{EVAL_PREFIX}{name}"), ("training", "held out"), styles, strict=True):
                curve = [(x, line[key]) for x, line in points if isinstance(line.get(key), float)]
                if curve:
                    axes.plot(*zip(*curve, strict=True), f"C{index}", label=f"{prefix}{label}", **style)
            if name in baseline:
                label = f"{prefix}baseline {baseline[name]:.3g}"
                axes.axhline(baseline[name], color="gray", linestyle="--", label=label)
        for x in phase_ends:
            axes.axvline(x, color="gray", linewidth=0.6)
        axes.set_title(title)
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    for axes in grid[-1]:
        axes.set_xlabel(x_label)
    save_figure(figure, path)


def plot_confusion(reports: Mapping[str, ClassReport], path: epath.Path, title: str) -> None:
    """Plots each confusion matrix of the reports in its own panel. Colors show each count divided by its row's total.

    The keys of `reports` are panel titles. `title` is the title of the figure.
    """
    from matplotlib.figure import Figure

    matrices = {
        name: (part.confusion, part.confusion_names) for name, part in reports.items() if part.confusion is not None
    }
    count = max(len(classes) for _, classes in matrices.values())
    side = float(np.clip(2.5 + 0.45 * count, 4, 14))
    figure = Figure(figsize=((side + 0.8) * len(matrices), side + 0.4), layout="constrained")
    figure.suptitle(_escape(title), fontsize=10, wrap=True)
    panels = figure.subplots(1, len(matrices), squeeze=False)[0]
    for axes, (name, (matrix, classes)) in zip(panels, matrices.items(), strict=True):
        names = [_escape(truncate_name(label)) for label in classes]
        shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set(title=name.strip("_"), xlabel="predicted label", ylabel="true label")
        if len(names) <= _MAX_NAMED_CLASSES:
            axes.set_xticks(range(len(names)), names, rotation=90)
            axes.set_yticks(range(len(names)), names)
        if len(names) <= _MAX_COUNTED_CLASSES:
            for i, j in zip(*np.nonzero(matrix), strict=True):
                color = "white" if shares[i, j] > 0.5 else "black"
                axes.text(j, i, f"{matrix[i, j]:,}", ha="center", va="center", color=color, fontsize=8)
    figure.colorbar(panels[-1].images[0], ax=panels, label="share of the true label's total", shrink=0.8)
    save_figure(figure, path)


def plot_cosines(labels: np.ndarray, cosines: np.ndarray, path: AnyPath) -> None:
    """Plots the cosine of each pair of texts against its score. Arrays are float32 [N]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.scatter(labels, cosines, s=6, alpha=0.4, linewidths=0)
    axes.set(xlabel="score", ylabel="cosine", title=f"{len(labels):,} pairs")
    axes.grid(alpha=0.3)
    save_figure(figure, path)


def save_figure(figure: Any, path: AnyPath) -> None:
    """Writes a matplotlib figure atomically to a PNG file."""
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        figure.savefig(file, format="png", dpi=110)


def _escape(text: str) -> str:
    # Escape dollar signs, because matplotlib reads text between them as a formula.
    return text.replace("$", r"\$")
