"""Exceptions, exit codes, and the formatting of values in one-line error messages.

A scheduler should restart a command that exits with 42 (`STOPPED`), 43 (`LOST`), 130 (`INTERRUPTED`) or 134, but not
one that exits with 1 or 2. JAX's coordination service aborts the first process that detects a lost host, and the
process exits with 134.
"""

import re
from collections.abc import Iterable

# Exit code if a signal stopped the run and a checkpoint was saved.
STOPPED = 42
# Exit code if another process of the run died, or if the run made no progress for `config.hang_seconds`.
LOST = 43
# Exit code if the command was interrupted by a signal.
INTERRUPTED = 130

_MAX_CHARACTERS = 200
_MAX_NAMES = 10
# Start of details that C++ libraries append to messages, such as [tensorstore_spec='...'].
_STATUS_DETAILS = re.compile(r" \[[\w. /]+=")


class BertjaxError(Exception):
    """Expected failure with a one-line message for the user. The exit code is 1.

    Attributes:
      on_all_hosts: whether all processes of a run raise the same error.
    """

    exit_code = 1
    on_all_hosts = False


class UsageError(BertjaxError):
    """Invalid flag, path, name or value. The exit code is 2."""

    exit_code = 2


class DivergenceError(BertjaxError):
    """Error for a loss that diverges, or for a loss or gradient that is not finite."""

    # All hosts raise this error, because loss and gradients are replicated.
    on_all_hosts = True


class UnavailableError(BertjaxError):
    """Failure to read an undamaged file, for example for lack of memory, permissions or network access."""


class LostError(BertjaxError):
    """Failure of another process of the run. The exit code is 43."""

    exit_code = LOST


def shortened(text: object, max_characters: int = _MAX_CHARACTERS) -> str:
    """Returns a text as one line. The middle of texts longer than `max_characters` is replaced by `...`."""
    line = " ".join(str(text).split())
    if len(line) <= max_characters:
        return line
    end = (max_characters - 5) // 3
    return f"{line[: max_characters - 5 - end]} ... {line[-end:]}"


def listed(names: Iterable[object], max_names: int = _MAX_NAMES) -> str:
    """Returns the first `max_names` names separated by commas, and the number of names left out."""
    names = list(names)
    shown = [shortened(name, _MAX_CHARACTERS // 2) for name in names[:max_names]]
    more = [f"and {len(names) - max_names:,} more"] if len(names) > max_names else []
    return ", ".join([*shown, *more])


def quoted(value: object) -> str:
    """Returns the shortened `repr` of a value, for messages."""
    return shortened(repr(value), _MAX_CHARACTERS // 2)


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or the exception's type if the message is empty.

    The message of an OSError is its reason alone, without the error number and the path.
    """
    lines = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
    return shortened(_STATUS_DETAILS.split(lines[0])[0] if lines else type(error).__name__)
