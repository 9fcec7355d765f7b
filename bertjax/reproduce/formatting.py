"""A table of the paper beside our results: as text, as Markdown, and for Figure 5 as a picture."""

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path

from bertjax.errors import UsageError
from bertjax.reproduce.paper import PaperTable, paper_table, table_names
from bertjax.reproduce.results import Results
from bertjax.reproduce.table import Cell, Run, Table, in_order
from bertjax.utils.io import atomic_file

NOT_THERE = "-"
_PAPER, _OURS = "paper", "ours"


@dataclasses.dataclass(frozen=True)
class Figure:
    """What stands in a cell for us.

    Attributes:
      values: of all seeds of the runs that are finished.
      share: of the runs that are finished, in words; "" where all are, or none.
      missing: the runs that would fill it, in order.
      lacks: the data that is not at hand; "" where nothing is lacking.
    """

    values: tuple[float, ...]
    share: str = ""
    missing: tuple[Run, ...] = ()
    lacks: str = ""

    @property
    def text(self) -> str:
        """Mean, and deviation where there are several values."""
        if not self.values:
            return NOT_THERE
        deviation = f" ±{statistics.stdev(self.values):.1f}" if len(self.values) > 1 else ""
        return f"{statistics.mean(self.values):.1f}{deviation}{self.share}"


def figure_of(cell: Cell, results: Results) -> Figure:
    """What runs of a cell came to."""
    found = [(run, results.outcome(run)) for run in cell.runs]
    metrics = [(run, seed) for run, outcome in found if outcome for seed in outcome.metrics]
    for run, seed in metrics:
        if cell.metric not in seed:
            raise UsageError(f"{run.name} has no metric {cell.metric}; it has {', '.join(sorted(seed))}")
    values = tuple(cell.factor * seed[cell.metric] for _, seed in metrics)
    finished = sum(outcome is not None for _, outcome in found)
    share = f" ({finished} of {len(found)})" if 0 < finished < len(found) else ""
    missing = tuple(in_order([run for run, outcome in found if outcome is None], results.is_done))
    return Figure(values, share, missing, "; ".join(dict.fromkeys(run.lacks for run in missing if run.lacks)))


@dataclasses.dataclass(frozen=True)
class Shown:
    """A table, ready to be written.

    Attributes:
      title: one line.
      columns: names.
      rows: name to what stands in each column: the paper's figure, "" where it has no such column, and ours.
      notes: lines below it.
      commands: that would fill what is missing, in order.
      lacking: columns or rows that cannot be filled, and why.
    """

    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[tuple[str, str], ...]]
    notes: tuple[str, ...]
    commands: tuple[str, ...]
    lacking: tuple[str, ...]


def shown(table: Table, results: Results) -> Shown:
    """The paper's figures beside ours.

    Raises:
      BertjaxError: what the results hold is damaged, or of other runs.
    """
    printed = _printed(table)
    ours = {(cell.row, cell.column): figure_of(cell, results) for cell in table.cells if not cell.mean_of}
    for cell in table.cells:
        if cell.mean_of:
            parts = [ours[cell.row, column] for column in cell.mean_of]
            whole = all(part.values for part in parts)
            mean = (statistics.mean(statistics.mean(part.values) for part in parts),) if whole else ()
            ours[cell.row, cell.column] = Figure(mean, next((part.share for part in parts if part.share), ""))
    columns = tuple(dict.fromkeys((*(printed.columns if printed else ()), *(cell.column for cell in table.cells))))
    names = dict.fromkeys((*(printed.rows if printed else ()), *(cell.row for cell in table.cells)))
    rows = {
        name: tuple((_printed_at(printed, name, column), _text_at(ours, name, column)) for column in columns)
        for name in names
    }
    missing = dict.fromkeys(run for figure in ours.values() for run in figure.missing)
    commands = tuple(run.command(results.folder) for run in missing)
    lacking: dict[str, list[str]] = {}
    for (_, column), figure in ours.items():
        if figure.lacks and column not in lacking.setdefault(figure.lacks, []):
            lacking[figure.lacks].append(column)
    title = f"{_name_of(table.number)}: {table.title or (printed.title if printed else '')}"
    title += f" (paper, section {printed.section})" if printed else ""
    notes = (*(printed.notes if printed else ()), f"ours: {table.scale}", *table.notes)
    return Shown(
        title,
        columns,
        rows,
        notes,
        commands,
        tuple(f"{', '.join(columns)}: needs {what}" for what, columns in lacking.items()),
    )


def _name_of(number: str) -> str:
    """`5` is Table 5, `figure3` Figure 3; a table of one's own has the name it was given."""
    if number.isdigit():
        return f"Table {number}"
    return f"Figure {number[6:]}" if number.startswith("figure") else number


def _printed(table: Table) -> PaperTable | None:
    return paper_table(table.number) if table.number in table_names() else None


def _printed_at(printed: PaperTable | None, row: str, column: str) -> str:
    if printed is None or column not in printed.columns:
        return ""
    if row not in printed.rows:
        return NOT_THERE
    value = printed.rows[row][printed.columns.index(column)]
    return NOT_THERE if value is None else f"{value:g}" if value < 10 else f"{value:.1f}"


def _text_at(ours: dict[tuple[str, str], Figure], row: str, column: str) -> str:
    return ours[row, column].text if (row, column) in ours else NOT_THERE


def as_text(table: Shown) -> str:
    """For a terminal: under each column what the paper has, and what we have."""
    names = ["", "", *table.rows]
    blocks = [names, *(_block(table, index) for index in range(len(table.columns)))]
    widths = [max(map(len, block)) for block in blocks]
    lines = [f"{name:<{widths[0]}}" for name in names]
    for block, width in zip(blocks[1:], widths[1:], strict=True):
        lines = [f"{line}   {text:>{width}}" for line, text in zip(lines, block, strict=True)]
    return "\n".join([table.title, "", *(line.rstrip() for line in lines), *_below(table)])


def _block(table: Shown, index: int) -> list[str]:
    """The lines of a column: its name, whose figures they are, and those of each row."""
    own = _is_ours(table, index)
    rows = [(_PAPER, _OURS), *(row[index] for row in table.rows.values())]
    width = [max(len(row[part]) for row in rows) for part in (0, 1)]
    lines = [f"{ours:>{width[1]}}" if own else f"{paper:>{width[0]}}  {ours:>{width[1]}}" for paper, ours in rows]
    return [table.columns[index], *lines]


def as_markdown(table: Shown) -> str:
    """The same as a table of Markdown."""
    ours = [_is_ours(table, index) for index in range(len(table.columns))]
    head = [
        f"{column}, {whose}"
        for column, own in zip(table.columns, ours, strict=True)
        for whose in ((_OURS,) if own else (_PAPER, _OURS))
    ]
    lines = [f"**{table.title}**", "", _line(["", *head]), _line(["---", *["---:"] * len(head)])]
    for name, row in table.rows.items():
        texts = [text for pair, own in zip(row, ours, strict=True) for text in (pair[1:] if own else pair)]
        lines.append(_line([name, *texts]))
    return "\n".join([*lines, *_below(table)])


def _is_ours(table: Shown, column: int) -> bool:
    """Whether the paper's table lacks the column."""
    return all(not row[column][0] for row in table.rows.values())


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _below(table: Shown) -> list[str]:
    lines = ["", *(f"- {note}" for note in table.notes)]
    lines += [f"- no data: {text}" for text in table.lacking]
    if table.commands:
        lines += ["", "What is missing, by these commands in this order (`bertjax reproduce` runs them all):", ""]
        lines += [f"    {command}" for command in table.commands]
    return lines


def draw_figure(table: Table, results: Results, path: Path) -> None:
    """Figure 5: fine-tuning along pre-training, the paper's on the left and ours on the right.

    Raises:
      UsageError: no result is there to be drawn.
    """
    from matplotlib.figure import Figure as Picture

    printed = paper_table(table.number)
    picture = Picture(figsize=(11, 4.2), layout="constrained")
    left, right = picture.subplots(1, 2)
    for index, name in enumerate(printed.columns):
        values = [row[index] for row in printed.rows.values()]
        left.plot([_thousands(row) for row in printed.rows], values, marker="o", label=name)
    left.set(title=f"{_PAPER}: {printed.title}", xlabel="thousand steps of pre-training", ylabel="%")
    for name in dict.fromkeys(cell.column for cell in table.cells):
        found = [(cell, figure_of(cell, results)) for cell in table.cells if cell.column == name]
        points = [(_thousands(cell.row), figure.values) for cell, figure in found if figure.values]
        if points:
            deviations = [statistics.stdev(values) if len(values) > 1 else 0.0 for _, values in points]
            means = [statistics.mean(values) for _, values in points]
            right.errorbar([step for step, _ in points], means, deviations, marker="o", capsize=3, label=name)
    if not right.containers:
        raise UsageError("nothing is there to be drawn; `bertjax reproduce` runs what is missing")
    right.set(title=f"{_OURS}: {table.title}", xlabel="thousand steps of pre-training", ylabel="%")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    with atomic_file(path) as here, open(here, "wb") as file:
        picture.savefig(file, format="png", dpi=110)


def _thousands(steps: str) -> float:
    return int(steps.replace(",", "")) / 1000
