"""JSON files, and one-line errors that name the file."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from bertjax.errors import first_line
from bertjax.utils.io import AnyPath, read_json_object, unreadable, write_atomic


@contextlib.contextmanager
def naming(file: AnyPath, fix: str = "copy it again") -> Iterator[None]:
    """Converts errors in the block, such as a missing key or a wrong type, to a UsageError that names the file."""
    try:
        yield
    except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        raise unreadable(file, f"{type(error).__name__}: {first_line(error)}", fix) from error


def read_object(file: AnyPath, optional: bool = False, fix: str = "copy it again") -> dict[str, Any]:
    """Reads a JSON object. Returns {} if the file is optional and does not exist."""
    with naming(file, fix):
        return {} if optional and not file.exists() else read_json_object(file)


def write_json(file: AnyPath, content: Any) -> None:
    """Writes a JSON file atomically. Raises a BertjaxError if this fails."""
    write_atomic(file, json.dumps(content, indent=1) + "\n")
