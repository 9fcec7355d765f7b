"""Tables 1 to 8 and Figure 5 of the paper as data (arXiv 1810.04805v2), read from `paper.json`."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from bertjax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class PaperTable:
    """A table or figure of the paper.

    Attributes:
      title: heading.
      section: section of the paper.
      columns: column labels.
      rows: row label to one number per column, in percent except for perplexities; None for an empty cell.
      notes: remarks on the numbers.
    """

    title: str
    section: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]
    notes: tuple[str, ...]


@functools.cache
def _tables() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("paper.json").read_text(encoding="utf-8"))["tables"]


def table_names() -> tuple[str, ...]:
    """Returns `1` to `8` and `figure5`."""
    return tuple(_tables())


def paper_table(name: str) -> PaperTable:
    """Returns a table of the paper; raises a UsageError for a name that the paper does not have."""
    if name not in _tables():
        raise UsageError(f"the paper has no table {name[:20]!r}; choose one of {', '.join(table_names())}")
    table = _tables()[name]
    rows = {label: tuple(values) for label, values in table["rows"].items()}
    return PaperTable(table["title"], table["section"], tuple(table["columns"]), rows, tuple(table["notes"]))
