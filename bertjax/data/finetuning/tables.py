"""Reading and writing of TSV, CSV and JSON Lines files. Readers count irregular rows."""

import csv
import dataclasses
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bertjax.data.finetuning.cells import is_literal, is_missing
from bertjax.errors import UsageError, first_line, listed
from bertjax.utils.io import atomic_file, decode_utf8, unix_newlines

FORMATS = ("tsv", "csv", "jsonl")
# Represents a field that is null or NaN.
NULL = object()
# Argument of `str.translate` that escapes backslashes, tabs and line breaks, so that a text is one line.
LINE_ESCAPES = str.maketrans({"\\": r"\\", "\t": r"\t", "\r": r"\r", "\n": r"\n"})
# TSV field that a CSV writer, such as pandas or Excel, has quoted because it contains quotes or a comma.
_QUOTED = re.compile(r'".*"".*"|"[^"]*,[^"]*"', re.DOTALL)
# Column of Prodigy files with an annotator's answer, and the answers that exclude a row. Case is ignored.
_ANSWER, _NOT_ACCEPTED = "answer", ("reject", "ignore")
# Usual names and values of a column that contains the split of each row, as in `stsbenchmark.tsv` and `AllNLI.tsv`.
# Case is ignored. A column with another name is also a split column if it has only these values.
_SPLIT_COLUMNS = ("split", "set", "data_split", "partition", "usage")
_SPLIT_FLAGS = ("is_valid", "is_test")  # columns that mark rows which are not for training
_TRAINING_SPLITS = {"train", "training"}
_SPLITS = _TRAINING_SPLITS | {"dev", "development", "val", "valid", "validation", "test", "testing", "eval"}
_SPLITS |= {"holdout", "heldout", "unsup", "publictest", "privatetest", "public_test", "private_test"}
_SURROGATES = re.compile("[\ud800-\udfff]")
# Escaped line break or tab, as in exports of mysql. LaTeX commands such as \nu, which continue with a lower-case
# letter, do not match.
_ESCAPED = re.compile(r"\\[nrt](?![a-z])")


@dataclasses.dataclass
class ReadStats:
    """Row counts of one file, stored in `results.json`."""

    file: str  # path of the file
    read: int = 0  # number of rows in the file
    used: int = 0  # number of rows that became examples
    columns: str = ""  # description of the columns that are used and ignored, for `summary`
    # For each reason, the number of skipped rows (`rows`) and the line or id of the first row (`first`).
    skipped: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    # Like `skipped`, but for irregular rows that are used anyway.
    noted: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def skip(self, reason: str, place: int | str) -> None:
        """Counts a row as skipped. `place` is the row's line number, or a text such as `question 42`."""
        _count(self.skipped, reason, place)

    def count_irregular(self, reason: str, place: int | str) -> None:
        """Counts an irregular row that is used anyway."""
        _count(self.noted, reason, place)

    def count_irregular_text(self, text: str, line: int) -> None:
        """Counts a text that looks like a list, bytes or a missing value, or contains escaped line breaks or tabs."""
        if is_literal(text):
            self.count_irregular("with a list or bytes, whose brackets and quotes are a part of the text", line)
        elif text and is_missing(text.strip()):
            self.count_irregular(f"with the text {text.strip()!r}, perhaps a missing value", line)
        elif _ESCAPED.search(text):
            self.count_irregular(r"with the characters \n, \r or \t, perhaps escaped line breaks or tabs", line)

    def describe_columns(self, names: Sequence[str], used: Sequence[str]) -> None:
        """Sets `columns`. `names` are all columns of the file, and `used` those that are read."""
        ignored = [name or "a column without a name" for name in names if name not in used]
        self.columns = f"columns {', '.join(used)}" + (f" (ignored: {listed(ignored)})" if ignored else "")

    def summary(self) -> str:
        """Formats the counts as one line."""
        parts = [f"{self.file}: {self.read:,} rows read, {self.used:,} used", *filter(None, [self.columns])]
        for verb, counts in (("skipped ", self.skipped), ("", self.noted)):
            parts += [f"{entry['rows']:,} {verb}{reason} (first: {entry['first']})" for reason, entry in counts.items()]
        return ", ".join(parts)


def _count(counts: dict[str, dict[str, Any]], reason: str, place: int | str) -> None:
    first = f"line {place}" if isinstance(place, int) else place
    counts.setdefault(reason, {"rows": 0, "first": first})["rows"] += 1


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table."""

    line: int  # line number at which the row starts, from 1
    fields: dict[str, Any]  # values by column name; strings, or lists from JSON Lines
    # Whether fields are missing, null or NaN (such fields are ""), or an annotator did not accept the row. Such rows
    # are predicted, but not scored.
    has_problem: bool = False


def read_table(
    path: Path,
    columns: Sequence[str],
    stats: ReadStats,
    header: Sequence[str] = (),
    keep_short: bool = False,
    optional: Sequence[str] = (),
    nullable: Sequence[str] = (),
    reject_quoted: bool = True,
) -> Iterator[Row]:
    """Yields the rows of a UTF-8 file, and counts them in `stats`; the caller sets `ReadStats.used`.

    In TSV, quotation marks are ordinary characters, as in GLUE's files. In CSV, they enclose fields. `header` contains
    the column names of a file without a header line. `keep_short` keeps rows with missing fields, so that predictions
    stay aligned with the file's rows. `optional` are columns that a JSON Lines file may lack in all rows.
    `nullable` are columns in which missing and null values are "".
    `reject_quoted` rejects a TSV file whose rows have the same number of fields only if parsed with CSV quotes.
    """
    file_format = table_format(path)
    text = read_utf8(path)
    if not text.strip():
        raise UsageError(f"{path} is empty; use a file with rows")
    if file_format == "jsonl":
        rows = _json_rows(path, text, columns)
    else:
        rows = _select_columns(path, _split_rows(path, text), columns, header, stats)
    num_short = 0
    names: dict[str, None] = {}  # keys of all rows, in order
    splits: dict[str, set[str]] = {}  # split names in each unused column; "" represents all other values
    for line, row in rows:
        stats.read += 1
        names |= dict.fromkeys(row)
        fields = {column: row.get(column) for column in columns}  # None if the row has no such field
        unused = {name: value for name, value in row.items() if name not in columns and value not in (None, "")}
        others = {name: str(value).strip().lower() for name, value in unused.items()}
        for name, value in others.items():
            if name.lower() in _SPLIT_FLAGS:  # "False" and "0" mark training rows.
                value = "train" if value in ("false", "0", "0.0") else "test"
            splits.setdefault(name, set()).add(value if value in _SPLITS else "")
        answers = (value for name, value in others.items() if name.lower() == _ANSWER and value in _NOT_ACCEPTED)
        problem = next((f"with the answer {answer!r}" for answer in answers), "")
        required = {name: field for name, field in fields.items() if name not in nullable}
        if null := [name for name, field in required.items() if field is NULL]:
            problem = f"with null or NaN as {null[0]!r}"
        if None in required.values():
            problem = "with too few fields"
            num_short += 1
        if problem and not keep_short:
            stats.skip(problem, line)
            continue
        if problem:
            stats.count_irregular(problem, line)
        if file_format == "tsv" and any(field and _QUOTED.fullmatch(field) for field in fields.values()):
            stats.count_irregular("with quoted fields, whose quotes are a part of the text in .tsv", line)
        cells = {name: "" if field in (None, NULL) else field for name, field in fields.items()}
        for name, field in cells.items():
            if isinstance(field, str) and _SURROGATES.search(field):
                stats.count_irregular("with unpaired surrogates, replaced by U+FFFD", line)
                cells[name] = replace_surrogates(field)
        yield Row(line, cells, bool(problem))
    if file_format == "jsonl":
        _check_columns(path, [*names], columns, stats, optional)
    for column, values in splits.items():
        is_split = "" not in values or column.lower() in _SPLIT_COLUMNS
        if not keep_short and is_split and len(values) > 1 and values & _SPLITS - _TRAINING_SPLITS:
            raise UsageError(
                f"{path} has rows of several splits (column {column!r}); write one file per split, or remove the column"
            )
    if file_format == "tsv" and reject_quoted and _is_quoted(text):
        raise UsageError(f"{path} has quoted fields with tabs or line breaks; in .tsv, quotes are text, so use .csv")
    # Reject quoted fields with line breaks, which become short rows. Short rows from blank lines are harmless.
    if file_format != "jsonl" and not keep_short and num_short > 0.75 * stats.read:
        raise UsageError(
            f"{num_short:,} of {stats.read:,} rows of {path} have too few fields; use .csv, and quote line breaks"
        )


def column_names(path: Path) -> list[str]:
    """Returns the names in the header line, or the keys of all objects of a JSON Lines file."""
    text = read_utf8(path).strip("\n")
    if table_format(path) == "jsonl":
        return [*dict.fromkeys(key for _, fields in _json_rows(path, text) for key in fields)]
    return next(_split_rows(path, text), (1, []))[1] or [""]


def table_format(path: Path) -> str:
    """Returns the format of a table, one of `FORMATS`, by its file name."""
    file_format = path.suffix.removeprefix(".").lower()
    if file_format not in FORMATS:
        known = ", ".join(f".{name}" for name in FORMATS)
        raise UsageError(f"unknown format of {path}; use a {known} file (decompress it, or rename JSON Lines)")
    return file_format


def write_table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table that `read_table` can read. In TSV, a space replaces tabs and line breaks."""
    file_format = table_format(path)
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8", newline="") as file:
        if file_format == "jsonl":
            objects = (dict(zip(columns, row, strict=True)) for row in rows)
            file.writelines(json.dumps(fields, ensure_ascii=False) + "\n" for fields in objects)
        elif file_format == "csv":
            # Quote all fields, because the reader drops leading spaces of unquoted fields.
            csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([columns, *rows])
        else:
            for row in [columns, *rows]:
                file.write("\t".join(re.sub(r"[\t\r\n]+", " ", field) for field in row) + "\n")


def read_utf8(path: Path) -> str:
    """Returns the text of a UTF-8 file, without byte-order mark and with LF as the only line end."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {first_line(error)}; check the path") from error
    return decode_utf8(path, b"".join(unix_newlines([data.removeprefix(b"\xef\xbb\xbf")])))


def _select_columns(
    path: Path, rows: Iterator[tuple[int, list[str]]], columns: Sequence[str], header: Sequence[str], stats: ReadStats
) -> Iterator[tuple[int, dict[str, str | None]]]:
    names = list(header) or next(rows)[1] or [""]
    _check_columns(path, names, columns, stats)
    indices = {name: names.index(name) for name in names}
    is_csv, num_long = table_format(path) == "csv", 0
    for line, fields in rows:
        if is_csv and not fields and len(names) > 1:  # a blank line, which is not a row in pandas either
            continue
        fields = fields or [""]
        # In concatenated files, a byte-order mark may precede the repeated header.
        if [fields[0].strip('\ufeff"'), *fields[1:]] == names and len(names) > 1:
            raise UsageError(f"{path} line {line} repeats the header, as in concatenated files; remove the line")
        is_long = any(fields[len(names) :])
        if is_long and is_csv and not header:
            problem = f"{path} line {line} has more fields than the header"
            raise UsageError(f"{problem}; name every column, and quote fields that contain commas")
        if is_long:
            stats.count_irregular("with more fields than columns", line)
            num_long += 1
        yield line, {name: fields[index] if index < len(fields) else None for name, index in indices.items()}
    # Reject files in which R wrote row names without a column name.
    if num_long == stats.read > 1 and not header:
        raise UsageError(f"all rows of {path} have more fields than its header; name every column")


def _check_columns(
    path: Path, names: Sequence[str], columns: Sequence[str], stats: ReadStats, optional: Sequence[str] = ()
) -> None:
    """Describes the columns in `stats`. Raises a UsageError unless `names` contains each required column once."""
    stats.describe_columns(names, columns)
    for column in columns:
        if names.count(column) != 1 and column not in optional:
            problem = f"no column {column!r}" if column not in names else f"several columns named {column!r}"
            existing = listed(repr(name) for name in names if name) or "(none)"
            raise UsageError(
                f"{path} has {problem}; its columns are {existing}; use one of them with a unique name (for --config "
                "text, set config.data.text and config.data.label; for --config embed, config.data.columns), or add a "
                "header line; fields are separated by tabs in .tsv, where quotes are text, and by commas in .csv"
            )


def _is_quoted(text: str) -> bool:
    """Returns True if all rows of a TSV file have the same number of fields only when parsed with CSV quotes."""
    if '"' not in text or len({line.count("\t") for line in text.rstrip("\n").split("\n")}) == 1:
        return False
    try:
        rows = csv.reader(io.StringIO(text.rstrip("\n"), newline=""), delimiter="\t", strict=True)
        return len({len(row) for row in rows}) == 1
    except csv.Error:
        return False


def _split_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the fields of each row of a TSV or CSV file. A blank line has no fields."""
    csv.field_size_limit(sys.maxsize)  # The default limit, 131,072 characters, rejects long fields.
    # Skip initial spaces, because otherwise the quotes around b in `"a", "b"` would be a part of the field.
    is_csv = table_format(path) == "csv"
    style: dict[str, Any] = {"skipinitialspace": True} if is_csv else {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    text = text.rstrip("\n")
    reader, lines = csv.reader(io.StringIO(text, newline=""), strict=True, **style), text.split("\n")
    line = 1
    try:
        for fields in reader:
            yield line, [] if is_csv and not lines[line - 1].strip() else fields
            line = reader.line_num + 1
    except csv.Error as error:
        fix = "check its quotes, and separate fields by commas" if is_csv else "check its quotes"
        raise UsageError(f"{path}: {error} in the row that starts at line {line}; {fix}") from error


def _json_rows(path: Path, text: str, columns: Sequence[str] = ()) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the line number and the object of each line, with the values of `columns` as text. A blank line is {}."""
    for line, row in enumerate(text.rstrip("\n").split("\n"), 1):
        try:
            fields = json.loads(row) if row.strip() else {}
            if not isinstance(fields, dict):
                raise ValueError("not a JSON object")
            fields |= {column: as_text(fields[column], column) for column in columns if column in fields}
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path} line {line}: {error}; write one JSON object per line, with strings as values"
            ) from error
        yield line, fields


def as_text(value: Any, column: str) -> Any:
    """Converts a JSON value to text. Returns null and NaN as `NULL`, and strings and lists unchanged."""
    if isinstance(value, dict):
        raise ValueError(f"{column!r} is an object")
    if value is None or value != value:  # NaN is not equal to itself.
        return NULL
    return value if isinstance(value, (str, list)) else json.dumps(value)


def replace_surrogates(text: str) -> str:
    """Replaces each unpaired surrogate, which UTF-8 cannot encode, by U+FFFD. The length does not change."""
    return _SURROGATES.sub("\ufffd", text)
