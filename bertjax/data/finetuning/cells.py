"""Interpretation of table cells: lists, missing values, and the names of labels."""

import ast
import contextlib
import io
import itertools
import json
import re
import tokenize
import unicodedata
from collections.abc import Collection, Iterable
from typing import Any

from bertjax.errors import UsageError, listed, quoted

# Cells that mean "missing" in `pandas.read_csv`, errors of spreadsheets, \N of database exports, and other spellings
# that no known dataset uses as class names.
_MISSING = (
    *("NaN", "nan", "-NaN", "-nan", "1.#QNAN", "-1.#QNAN", "1.#IND", "-1.#IND", "NULL", "null", "None"),
    *("NA", "<NA>", "#NA", "N/A", "n/a", "#N/A", "#N/A N/A", "Nan", "Null", "n.a.", "\\N"),
    *("#DIV/0!", "#NAME?", "#NULL!", "#NUM!", "#REF!", "#VALUE!"),
)
# Label cells that look like lists, including `array(['a'], dtype=object)` and the start of a list that was split at a
# comma. A label in parentheses, such as `(other)`, is not a list.
_LABELS = re.compile(r"(\w+\(\s*)?(\[.*\]|\{.*\}|\(.*[,'\"].*\))(.*\))?|[\[({]\s*['\"].*|(set)?\(\)", re.DOTALL)
# Texts that look like lists of words. Ordinary text may also start with a bracket, as in `[1]`.
_WORDS = re.compile(r"(\w+\(\s*)?[\[({]\s*['\"].*[\])}]|\[\s*\]", re.DOTALL)
# List without commas as NumPy prints it, dictionary of texts, or bytes, such as the strings of TensorFlow Datasets.
_PRINTED = re.compile(
    r"\[\s*(['\"]).*\1\s*\]|\{\s*(['\"]).*\2\s*\}|b'(?:[^'\\]|\\.)*'|b\"(?:[^\"\\]|\\.)*\"", re.DOTALL
)


def read_list(cell: Any, place: str, in_text: bool = False) -> list[Any] | None:
    """Returns the items of a cell that contains a JSON or Python list, tuple or set, or None for other cells.

    With `in_text`, the cell contains text, so brackets without quotes, such as `[1]`, are not a list. Raises a
    UsageError that names `place` if the cell looks like a list but is invalid, such as a NumPy array without commas.
    """
    if not isinstance(cell, str):
        return cell if isinstance(cell, list) else None
    text = cell.strip()
    if text.startswith('"') and text.endswith('"'):
        # Remove quotes, because pandas quotes TSV fields that contain quotes.
        text = text[1:-1].replace('""', '"')
    if not (_WORDS if in_text else _LABELS).fullmatch(text):
        return None
    value = _parse(text)
    if isinstance(value, (list, tuple, set)):
        return list(value)
    if in_text and text.startswith("("):
        return None
    raise UsageError(
        f'{place} is {quoted(cell)}, not a list in JSON or Python; write a list such as ["a", "b"], or no brackets'
    )


def is_list(cell: Any) -> bool:
    """Returns whether the cell of a text column is a list, or a string that contains a JSON or Python list."""
    try:
        return read_list(cell, "", in_text=True) is not None
    except UsageError:
        return False


def is_literal(cell: Any) -> bool:
    """Returns whether a text cell probably contains a list, a dictionary or bytes as Python or NumPy print them."""
    return is_list(cell) or _PRINTED.fullmatch(cell.strip()) is not None


def _parse(text: str) -> Any:
    """Returns the value of a JSON or Python expression, or None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text)
        tokens = [token.type for token in tokenize.generate_tokens(io.StringIO(text).readline)]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    # Reject adjacent strings, because Python would join them: the NumPy array `['a' 'b']` would become `['ab']`.
    joins = itertools.pairwise(token for token in tokens if token != tokenize.NL)
    return None if (tokenize.STRING, tokenize.STRING) in joins else value


def label_name(value: Any) -> str:
    """Converts a cell or list item to a label name, without surrounding whitespace."""
    return value.strip() if isinstance(value, str) else json.dumps(value)


def is_missing(name: str) -> bool:
    """Returns True if a label is empty or means "missing": NaN, NA, None, null and the like."""
    return not name or name in _MISSING


def is_integer(name: str) -> bool:
    """Returns True if a label is an integer such as `1`, `-100` or `1.0`."""
    return re.fullmatch(r"[+-]?\d+(\.0+)?", name) is not None


def is_number(name: str) -> bool:
    """Returns True if a label is a number such as `1`, `-0.5` or `3e-2`."""
    return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", name, re.IGNORECASE) is not None


def label_key(name: str) -> str:
    """Returns the same key for all spellings of a label: `1`, `1.0` and `LABEL_1`, or `true`, `True` and `TRUE`."""
    name = re.sub(r"^LABEL_(?=\d+$)", "", name)
    if is_integer(name):
        return name.partition(".")[0]
    return name.lower() if name.lower() in ("true", "false") else name


def spelling_problem(labels: Collection[str]) -> str:
    """Returns a warning if labels differ only in case, whitespace, Unicode form or invisible characters, else ""."""
    groups: dict[str, list[str]] = {}
    for label in labels:
        visible = "".join(character for character in label if unicodedata.category(character) != "Cf")
        groups.setdefault(" ".join(unicodedata.normalize("NFC", visible).casefold().split()), []).append(label)
    similar = [repr(label) for group in groups.values() if len(group) > 1 for label in sorted(group)]
    return f"labels that differ only in their spelling are different classes: {listed(similar)}" if similar else ""


def missing_class_problem(labels: Collection[str]) -> str:
    """Returns a warning if -1 (besides 0, 1, 2, ...) or "-" is a class, which may mark missing labels, else ""."""
    if len(labels) > 3 and {*labels} == {*map(str, range(-1, len(labels) - 1))}:
        return f"the classes are -1 to {len(labels) - 2}; -1 may mark missing labels"
    if "-" in labels and "+" not in labels:
        return "a class is named '-', which marks missing labels in SNLI and MNLI; if it does here, remove its rows"
    return ""


def sort_labels(names: Iterable[str]) -> list[str]:
    """Sorts label names, by value if all are numbers: 2 is before 10, and -2 before -1."""
    names = sorted(names)
    with contextlib.suppress(ValueError):
        return sorted(names, key=float)
    return names
