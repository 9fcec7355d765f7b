"""Output of reproduced tables: the paper's numbers next to ours as text or Markdown, and a plot of Figure 5."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bertjax.errors import UsageError
from bertjax.reproduce.results import Results
from bertjax.reproduce.table import PAPER_TABLES, Cell, PaperTable, Table, missing_data
from bertjax.training.plots import save_figure

EMPTY = "-"
_PAPER, _OURS = "paper", "ours"


class CellValue(NamedTuple):
    """Metric values of a cell's finished runs, one per seed. While runs are missing, `progress` is like ` (1 of 2)`."""

    values: tuple[float, ...] = ()
    progress: str = ""
    digits: int = 1

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def text(self) -> str:
        """Mean as text, with the standard deviation if there are several values. `-` if there are no values."""
        if not self.values:
            return EMPTY
        numbers = (self.mean, self.deviation) if len(self.values) > 1 else (self.mean,)
        return " ±".join(f"{number:.{self.digits}f}" for number in numbers) + self.progress


class FormattedTable(NamedTuple):
    """Table whose cells are formatted as text.

    `columns` maps (column name, source) to one text per row. The source is `paper` or `ours`, and for columns of the
    same name, `paper` comes first. `commands` are the shell commands of the unfinished runs, in order.
    """

    title: str
    rows: tuple[str, ...]
    columns: dict[tuple[str, str], tuple[str, ...]]
    notes: tuple[str, ...]
    commands: tuple[str, ...]


def format_table(table: Table, results: Results) -> FormattedTable:
    """Formats a table with the paper's numbers and ours."""
    paper, values = PAPER_TABLES.get(table.name, PaperTable()), cell_values(table, results)
    rows = [*dict.fromkeys((*paper.rows, *(cell.row for cell in table.cells)))]
    if table.name == "figure5":
        rows.sort(key=_thousands)
    columns = {}
    for name in dict.fromkeys((*paper.columns, *(cell.column for cell in table.cells))):
        if name in paper.columns:
            index = [*paper.columns].index(name)
            numbers = (paper.rows[row][index] if row in paper.rows else None for row in rows)
            columns[name, _PAPER] = tuple(map(_paper_text, numbers))
        columns[name, _OURS] = tuple(values.get((row, name), CellValue()).text for row in rows)
    done = results.finished(table.runs())
    commands = tuple(run.command(results.folder) for run in table.runs(done))
    title = f"{_label(table.name)}: {table.title or paper.title}"
    title += f" (paper, section {paper.section})" if paper.section else ""
    without_data: dict[str, dict[str, None]] = {}
    for cell in table.cells:
        if data := missing_data(cell.runs, done):
            without_data.setdefault(data, {})[cell.column] = None
    missing = [f"no data for {', '.join(names)}: needs {data}" for data, names in without_data.items()]
    notes = (*paper.notes, f"ours: {table.scale}", *table.notes, *missing)
    return FormattedTable(title, tuple(rows), columns, notes, commands)


def cell_values(table: Table, results: Results) -> dict[tuple[str, str], CellValue]:
    """Returns the values of a table's cells, keyed by (row, column)."""
    values: dict[tuple[str, str], CellValue] = {}
    for cell in table.cells:
        if not cell.mean_of:
            values[cell.row, cell.column] = _cell_value(cell, results)
    for cell in table.cells:
        column_values = [values[cell.row, column] for column in cell.mean_of]
        if column_values and all(value.values for value in column_values):
            progress = next((value.progress for value in column_values if value.progress), "")
            mean = statistics.mean(value.mean for value in column_values)
            values[cell.row, cell.column] = CellValue((mean,), progress)
    return values


def _cell_value(cell: Cell, results: Results) -> CellValue:
    seconds = results.seconds
    values, done = [], 0
    for run in cell.runs:
        outcome = results.outcome(run)
        # Skip the duration of a resumed run, because it is unknown.
        if outcome is None or (cell.metric == "seconds" and run.name not in seconds):
            continue
        done += 1
        run_metrics = {"flops": run.flops, "seconds": seconds.get(run.name, 0.0)}
        for metrics in ({**seed_metrics, **run_metrics} for seed_metrics in outcome.metrics):
            if cell.metric not in metrics:
                known = ", ".join(sorted(metrics))
                raise UsageError(f"the results of {run.name} lack the metric {cell.metric}; use one of {known}")
            values.append(cell.factor * metrics[cell.metric])
    progress = f" ({done} of {len(cell.runs)})" if 0 < done < len(cell.runs) else ""
    return CellValue(tuple(values), progress, cell.digits)


def _label(name: str) -> str:
    if name.isdigit():
        return f"Table {name}"
    return f"Figure {name.removeprefix('figure')}" if name.startswith("figure") else name


def _paper_text(value: float | None) -> str:
    return EMPTY if value is None else f"{value:g}" if value < 10 else f"{value:.1f}"


def as_text(table: FormattedTable) -> str:
    """Returns the table as text for a terminal. The paper's column and our column share one heading."""
    blocks = [_padded(["", "", *table.rows], left=True)]
    for name, columns in itertools.groupby(table.columns.items(), key=lambda column: column[0][0]):
        parts = [_padded([source, *texts]) for (_, source), texts in columns]
        blocks.append(_padded([name, *map("  ".join, zip(*parts, strict=True))]))
    lines = ["   ".join(line).rstrip() for line in zip(*blocks, strict=True)]
    return "\n".join([table.title, "", *lines, *_footer(table)])


def as_markdown(table: FormattedTable) -> str:
    """Returns the table as Markdown."""
    header = ["", *map(", ".join, table.columns)]
    rows = zip(table.rows, *table.columns.values(), strict=True)
    lines = [header, ["---", *["---:"] * len(table.columns)], *rows]
    return "\n".join([f"**{table.title}**", "", *(f"| {' | '.join(line)} |" for line in lines), *_footer(table)])


def _padded(texts: Sequence[str], left: bool = False) -> list[str]:
    width = max(map(len, texts))
    return [text.ljust(width) if left else text.rjust(width) for text in texts]


def _footer(table: FormattedTable) -> list[str]:
    lines = ["", *(f"- {note}" for note in table.notes)]
    if table.commands:
        lines += ["", "Commands of the missing runs, in order (`bertjax reproduce` runs all of them):", ""]
        lines += [f"    {command}" for command in table.commands]
    return lines


def plot_figure5(table: Table, results: Results, path: Path) -> None:
    """Plots fine-tuning metrics by pre-training step to a PNG file, with the paper's curves left and ours right."""
    from matplotlib.figure import Figure

    paper = PAPER_TABLES[table.name]
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(paper.columns):
        values = [row[index] for row in paper.rows.values()]
        left.plot([_thousands(row) for row in paper.rows], values, marker="o", label=name)
    series: dict[str, list[tuple[float, float, float]]] = {}
    for (row, name), value in cell_values(table, results).items():
        if value.values:
            series.setdefault(name, []).append((_thousands(row), value.mean, value.deviation))
    for name, points in series.items():
        right.errorbar(*zip(*points, strict=True), marker="o", capsize=3, label=name)
    for axes, title in ((left, f"{_PAPER}: {paper.title}"), (right, f"{_OURS}: {table.title}")):
        axes.set(title=title, xlabel="pre-training steps, thousands", ylabel="%")
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, path)


def _thousands(steps: str) -> float:
    return int(steps.replace(",", "")) / 1000
