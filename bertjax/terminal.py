"""What is written to a terminal."""

import re
import sys
from typing import TextIO

# All control characters but tab and line end, what turns the direction of text, ends of lines and paragraphs of other
# kinds, and halves of characters. A terminal obeys some of them: text of a file could hide or forge what is shown.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with everything that a terminal might obey as its code, such as `\x1b`; tabs and line ends stay."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def show(text: object, file: TextIO | None = None) -> None:
    """Prints a result, on standard output unless told otherwise."""
    print(printable(str(text)), file=file or sys.stdout)
