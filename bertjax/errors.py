"""How a command can end, with its exit code, and what may stand in the one line of an error.

0 is done. A scheduler starts the same command again after STOPPED and LOST, and not after the codes of the errors.
"""

import re
from collections.abc import Iterable

_MOST_CHARACTERS = 200
# What libraries of C++ append to a message for programs to read, such as [tensorstore_spec='...'].
_STATUS_DETAILS = re.compile(r" \[[\w. /]+=")
_MOST_NAMES = 10


# Asked to stop; what was done is saved.
STOPPED = 42
# Another process of the run is gone, or none of its steps ends any more.
LOST = 43
# Asked to stop where there was nothing to save.
INTERRUPTED = 130


class BertjaxError(Exception):
    """A failure the user should read as one line: what, which value, where, and the way out. Exit code 1.

    Attributes:
      ends_all: it is raised in all processes of a run, each of which lets the others say why before they are left.
    """

    exit_code = 1
    ends_all = False


class UsageError(BertjaxError):
    """The user asked for something that cannot be: a wrong flag, path, name or value. Exit code 2."""

    exit_code = 2


class LostError(BertjaxError):
    """This process has done nothing wrong, and cannot go on without the others. Exit code 43."""

    exit_code = LOST


def shortened(text: object, most: int = _MOST_CHARACTERS) -> str:
    """A text as one line of at most `most` characters; a longer one keeps its beginning and end, which says why."""
    line = " ".join(str(text).split())
    if len(line) <= most:
        return line
    end = (most - 5) // 3
    return f"{line[: most - 5 - end]} ... {line[-end:]}"


def listed(names: Iterable[object], most: int = _MOST_NAMES) -> str:
    """Names with commas between them, the first few of many and how many more there are, each shortened."""
    given = list(names)
    shown = [shortened(name, _MOST_CHARACTERS // 2) for name in given[:most]]
    more = [f"and {len(given) - most:,} more"] if len(given) > most else []
    return ", ".join([*shown, *more])


def quoted(value: object) -> str:
    """A value from a file as it may stand in a message: in quotes, with escapes, shortened."""
    return shortened(repr(value), _MOST_CHARACTERS // 2)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, short enough to stand inside one of ours."""
    text = str(error).strip().splitlines()
    return shortened(_STATUS_DETAILS.split(text[0])[0] if text else type(error).__name__)
