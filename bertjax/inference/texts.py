"""Texts to ask a model about: the lines of a file or of standard input, read as they are needed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from bertjax.errors import UsageError
from bertjax.utils.io import reject_utf16

STANDARD_INPUT = "-"
# Between the two texts of a pair.
PAIR = " ||| "
# More than any text, and little enough to hold: a file without line ends is one line.
_LINE_BYTES = 1 << 24
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def lines_of(path: str) -> Iterator[str]:
    """The lines of a UTF-8 file, or of standard input for `-`; one at a time is in memory.

    Raises:
      UsageError: at once where the file cannot be read or is empty; on the way a line that is no text.
    """
    name = "standard input" if path == STANDARD_INPUT else path
    try:
        file = sys.stdin.buffer if path == STANDARD_INPUT else Path(path).expanduser().open("rb")
        first = file.readline(_LINE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error
    reject_utf16(name, first)
    if not first:
        raise UsageError(f"{name} is empty; give a text on each line")
    return _decoded(file, first.removeprefix(_BYTE_ORDER_MARK), name)


def _decoded(file: IO[bytes], line: bytes, name: str) -> Iterator[str]:
    number = 1
    with file:
        while line:
            if len(line) > _LINE_BYTES:
                raise UsageError(f"{name} line {number} has more than {_LINE_BYTES:,} bytes; give a text on each line")
            try:
                yield line.removesuffix(b"\n").removesuffix(b"\r").decode()
            except UnicodeDecodeError as error:
                raise UsageError(f"{name} line {number} is not UTF-8 at byte {error.start}") from error
            number += 1
            line = file.readline(_LINE_BYTES + 1)
