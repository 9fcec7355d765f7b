"""The paper's tables and its Figure 5, as data (arXiv 1810.04805v2)."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from bertjax.errors import UsageError

_FILE = Path(__file__).with_name("paper.json")


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table of the paper, or a figure as one.

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


@functools.cache
def _tables() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))["tables"]


def table_names() -> tuple[str, ...]:
    """`1` to `8` and `figure5`."""
    return tuple(_tables())


def paper_table(number: str) -> PaperTable:
    """A table by its number.

    Raises:
      UsageError: the paper has none of it.
    """
    if number not in _tables():
        raise UsageError(f"the paper has no table {number[:20]!r}; known: {', '.join(table_names())}")
    found = _tables()[number]
    rows = {name: tuple(values) for name, values in found["rows"].items()}
    return PaperTable(found["title"], found["section"], tuple(found["columns"]), rows, tuple(found["notes"]))
