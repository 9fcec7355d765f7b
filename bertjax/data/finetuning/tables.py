"""Rows of TSV, CSV and JSON Lines files, every one of them accounted for."""

import csv
import dataclasses
import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bertjax.errors import UsageError, listed
from bertjax.utils.io import normalize_newlines, reject_utf16

FORMATS = ("tsv", "csv", "jsonl")
_SHORT, _LONG = "with too few fields", "with more fields than columns"
_ESCAPES = {"\\": r"\\", "\t": r"\t", "\r": r"\r", "\n": r"\n"}
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclasses.dataclass
class ReadStats:
    """What became of the rows of one file.

    Attributes:
      file: its path.
      read, used: rows.
      columns: which of the file's are read and which are not, where it has any.
      skipped, noted: reason to how many rows, and where the first one is; skipped rows are not used, noted ones are.
    """

    file: str
    read: int = 0
    used: int = 0
    columns: str = ""
    skipped: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    noted: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def skip(self, reason: str, place: int | str) -> None:
        """Counts a row that is left out; `place` is its line, or the id it has."""
        _count(self.skipped, reason, place)

    def note(self, reason: str, place: int | str) -> None:
        """Counts a row that is taken all the same."""
        _count(self.noted, reason, place)

    def summary(self) -> str:
        """One line for a person."""
        parts = [f"{self.file}: {self.read:,} rows read, {self.used:,} used", *filter(None, [self.columns])]
        for verb, found in (("skipped ", self.skipped), ("", self.noted)):
            parts += [f"{entry['rows']:,} {verb}{reason} (first: {entry['first']})" for reason, entry in found.items()]
        return ", ".join(parts)


def _count(found: dict[str, dict[str, Any]], reason: str, place: int | str) -> None:
    first = f"line {place}" if isinstance(place, int) else place
    found.setdefault(reason, {"rows": 0, "first": first})["rows"] += 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of a file.

    Attributes:
      line: that it starts at, from 1.
      fields: by column name; a list only where JSON has one.
      is_short: a wanted column is missing, and "" stands for it.
    """

    line: int
    fields: dict[str, Any]
    is_short: bool = False


def read_table(
    path: str | Path,
    columns: Sequence[str],
    reading: ReadStats,
    *,
    optional: Sequence[str] = (),
    form: str = "tsv",
    header: bool | Sequence[str] = True,
    keep_short: bool = False,
) -> Iterator[Row]:
    """The rows of a file that have all wanted columns; `reading` tells of those that have not.

    UTF-8; a byte-order mark and Windows line ends are taken off. In TSV a quote is literal text, as in GLUE's files; in
    CSV it quotes.

    Args:
      path: the file.
      columns: that must be there.
      reading: counts `read` and `skipped`; `used` is the caller's.
      optional: columns that are read where they are there.
      form: `tsv`, `csv` or `jsonl`.
      header: True if the first line names the columns, else their names.
      keep_short: whether a row that lacks a wanted column is kept with an empty one, as predictions need, which are
        told apart by their number; else it is skipped. Either is counted.

    Raises:
      UsageError: the file or a column is missing, the file is empty or UTF-16, a line is not JSON, or a quote never
        closes; with file and line.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    reject_utf16(path, data)
    text = normalize_newlines(data.removeprefix(b"\xef\xbb\xbf")).decode("utf-8", "surrogateescape")
    if not text.strip():
        raise UsageError(f"{path} is empty")
    if form == "jsonl":
        rows = _json_rows(path, text, columns, optional)
    else:
        split = _tsv_rows(text) if form == "tsv" else _csv_rows(path, text)
        rows = _split_rows(path, split, columns, optional, header, reading)
    for line, fields in rows:
        reading.read += 1
        is_short = None in fields.values()
        if is_short:
            if not keep_short:
                reading.skip(_SHORT, line)
                continue
            reading.note(_SHORT, line)
        cleaned = {name: _clean(field or "", reading, line) for name, field in fields.items()}
        yield Row(line, cleaned, is_short)


def _split_rows(
    path: Path,
    rows: Iterator[tuple[int, list[str]]],
    columns: Sequence[str],
    optional: Sequence[str],
    header: bool | Sequence[str],
    reading: ReadStats,
) -> Iterator[tuple[int, dict[str, str | None]]]:
    if header is True:
        _, names = next(rows)
    else:
        names = list(header)
    missing = [column for column in columns if column not in names]
    if missing:
        raise UsageError(f"{path} has no column {missing[0]!r}; its columns are {listed(names) or '(none)'}")
    twice = [column for column in columns if names.count(column) > 1]
    if twice:
        raise UsageError(f"{path} has {names.count(twice[0])} columns {twice[0]!r}; give them names of their own")
    wanted = [*columns, *(name for name in optional if name in names)]
    unread = [name for name in names if name not in wanted]
    reading.columns = f"columns {', '.join(wanted)}" + (f" (not read: {listed(unread)})" if unread else "")
    indices = {name: names.index(name) for name in wanted}
    for line, fields in rows:
        if len(fields) > len(names):
            reading.note(_LONG, line)
        yield line, {name: fields[index] if index < len(fields) else None for name, index in indices.items()}


def _lines(text: str) -> list[str]:
    """The lines, but for blank ones at the end."""
    return text.rstrip("\r\n").split("\n")


def _tsv_rows(text: str) -> Iterator[tuple[int, list[str]]]:
    for line, row in enumerate(_lines(text), 1):
        yield line, row.removesuffix("\r").split("\t")


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(io.StringIO(text.rstrip("\r\n"), newline=""), strict=True)
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


def _json_rows(
    path: Path, text: str, columns: Sequence[str], optional: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, row in enumerate(_lines(text), 1):
        try:
            fields = json.loads(row) if row.strip() else {}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} line {line} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise UsageError(f"{path} line {line} is not a JSON object")
        wanted = [*columns, *(name for name in optional if name in fields)]
        nested = [column for column in wanted if isinstance(fields.get(column), dict)]
        if nested:
            raise UsageError(f"{path} line {line}: {nested[0]} is an object, not a text or a list of words")
        yield line, {column: _text(fields.get(column)) for column in wanted}


def _text(value: Any) -> Any:
    return value if value is None or isinstance(value, (str, list)) else json.dumps(value)


def _clean(field: Any, reading: ReadStats, line: int) -> Any:
    if not isinstance(field, str) or field.isascii():
        return field
    try:
        return decoded(field.encode("utf-8", "surrogateescape"), reading, line)
    except UnicodeEncodeError:
        reading.note("with half a character, as broken JSON has them", line)
        return whole_characters(field)


def whole_characters(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair, which no file can hold; as long as before."""
    return _SURROGATES.sub("\ufffd", text)


def one_line(text: str) -> str:
    r"""The text with `\t`, `\r` and `\n` for its tabs and line ends, and `\\` for a backslash, as a field of a line."""
    return re.sub(r"[\\\t\r\n]", lambda found: _ESCAPES[found[0]], text)


def decoded(text: bytes, reading: ReadStats, line: int) -> str:
    """UTF-8 to text; what is none becomes U+FFFD, and is noted."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        reading.note("with bytes that are not UTF-8", line)
        return text.decode("utf-8", "replace")
