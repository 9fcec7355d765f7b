"""Rows of TSV, CSV and JSON Lines files, every one of them accounted for."""

import csv
import dataclasses
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bertjax.errors import UsageError

FORMATS = ("tsv", "csv", "jsonl")
_SHORT = "with too few fields"


@dataclasses.dataclass
class Reading:
    """What became of the rows of one file.

    Attributes:
      file: its path.
      read, used: rows.
      skipped, noted: reason to how many rows, and where the first one is; skipped rows are not used, noted ones are.
    """

    file: str
    read: int = 0
    used: int = 0
    skipped: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    noted: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def skip(self, reason: str, place: int | str) -> None:
        _count(self.skipped, reason, place)

    def note(self, reason: str, place: int | str) -> None:
        _count(self.noted, reason, place)

    def summary(self) -> str:
        """One line for a person."""
        parts = [f"{self.file}: {self.read:,} rows read, {self.used:,} used"]
        for verb, found in (("skipped ", self.skipped), ("", self.noted)):
            parts += [f"{entry['rows']:,} {verb}{reason} (first: {entry['first']})" for reason, entry in found.items()]
        return ", ".join(parts)


def _count(found: dict[str, dict[str, Any]], reason: str, place: int | str) -> None:
    first = f"line {place}" if isinstance(place, int) else place
    found.setdefault(reason, {"rows": 0, "first": first})["rows"] += 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One row: the line it starts at, from 1, and its fields by column name; a list only where JSON has one."""

    line: int
    fields: dict[str, Any]


def read_table(
    path: str | Path,
    columns: Sequence[str],
    reading: Reading,
    *,
    form: str = "tsv",
    header: bool | Sequence[str] = True,
    keep_short: bool = False,
) -> Iterator[Row]:
    """The rows of a file that have all wanted columns; `reading` tells of those that have not.

    A byte-order mark and Windows line ends are taken off. In TSV a quote is literal text, as in GLUE's files; in CSV
    it quotes.

    Args:
      path: the file.
      columns: that must be there.
      reading: counts `read` and `skipped`; `used` is the caller's.
      form: `tsv`, `csv` or `jsonl`.
      header: True if the first line names the columns, else their names.
      keep_short: whether a row that lacks a wanted column is kept with an empty one, as predictions need, which are
        told apart by their number; else it is skipped. Either is counted.

    Raises:
      UsageError: the file or a column is missing, the file is empty, a line is not JSON, or a quote never closes; with
        file and line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8", "surrogateescape")
    if not text.strip():
        raise UsageError(f"{path} is empty")
    if form == "jsonl":
        rows = _json_rows(path, text, columns)
    else:
        rows = _split_rows(path, _tsv_rows(text) if form == "tsv" else _csv_rows(path, text), columns, header)
    for line, fields in rows:
        reading.read += 1
        if None in fields:
            if not keep_short:
                reading.skip(_SHORT, line)
                continue
            reading.note(_SHORT, line)
        values = (_clean(field or "", reading, line) for field in fields)
        yield Row(line, dict(zip(columns, values, strict=True)))


def _split_rows(
    path: Path, rows: Iterator[tuple[int, list[str]]], columns: Sequence[str], header: bool | Sequence[str]
) -> Iterator[tuple[int, list[str | None]]]:
    if header is True:
        _, names = next(rows)
    else:
        names = list(header)
    missing = [column for column in columns if column not in names]
    if missing:
        raise UsageError(f"{path} has no column {missing[0]!r}; its columns are {', '.join(names) or '(none)'}")
    indices = [names.index(column) for column in columns]
    for line, fields in rows:
        yield line, [fields[index] if index < len(fields) else None for index in indices]


def _lines(text: str) -> list[str]:
    """The lines; what follows the last line's end is none."""
    return text.removesuffix("\n").split("\n")


def _tsv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for line, row in enumerate(_lines(text), 1):
        yield line, row.removesuffix("\r").split("\t")


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            what = "a quote opens here and never closes" if "unexpected end" in str(error) else str(error)
            raise UsageError(f"{path} line {line}: {what}") from error
        yield line, fields or [""]
        line = reader.line_num + 1


def _json_rows(path: Path, text: str, columns: Sequence[str]) -> Iterator[tuple[int, list[Any]]]:
    for line, row in enumerate(_lines(text), 1):
        try:
            fields = json.loads(row) if row.strip() else {}
        except ValueError as error:
            raise UsageError(f"{path} line {line} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise UsageError(f"{path} line {line} is not a JSON object")
        yield line, [_text(fields.get(column)) for column in columns]


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, list)) else json.dumps(value)


def _clean(field: Any, reading: Reading, line: int) -> Any:
    if not isinstance(field, str) or field.isascii():
        return field
    return decoded(field.encode("utf-8", "surrogateescape"), reading, line)


def decoded(text: bytes, reading: Reading, line: int) -> str:
    """UTF-8 to text; what is none becomes U+FFFD, and is noted."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        reading.note("with bytes that are not UTF-8", line)
        return text.decode("utf-8", "replace")
