"""The paper's tables and its Figure 5, as data (arXiv 1810.04805v2)."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from bertjax.errors import UsageError

_FILE = Path(__file__).with_name("paper.json")
FIGURE = "figure5"


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Attributes:
      title: what it shows.
      section: of the paper, that it belongs to.
      columns: names.
      rows: name to a figure for each column, in percent but for perplexities; None where the paper has none.
      notes: how the figures are to be read.
    """

    title: str
    section: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PaperFigure:
    """Figure 5: what fine-tuning comes to from checkpoints along pre-training.

    Attributes:
      title, section, notes: as of a table.
      steps: of pre-training.
      series: name to a figure for each of them, in percent.
    """

    title: str
    section: str
    steps: tuple[int, ...]
    series: dict[str, tuple[float, ...]]
    notes: tuple[str, ...]


@functools.cache
def _content() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def table_names() -> tuple[str, ...]:
    """`1` to `8` and `figure5`."""
    return (*_content()["tables"], FIGURE)


def paper_table(number: str) -> PaperTable:
    """A table by its number.

    Raises:
      UsageError: the paper has none of it.
    """
    tables = _content()["tables"]
    if number not in tables:
        raise UsageError(f"the paper has no table {number[:20]!r}; known: {', '.join(table_names())}")
    found = tables[number]
    rows = {name: tuple(values) for name, values in found["rows"].items()}
    return PaperTable(found["title"], found["section"], tuple(found["columns"]), rows, tuple(found["notes"]))


def paper_figure() -> PaperFigure:
    """Figure 5."""
    found = _content()[FIGURE]
    series = {name: tuple(values) for name, values in found["series"].items()}
    return PaperFigure(found["title"], found["section"], tuple(found["steps"]), series, tuple(found["notes"]))
