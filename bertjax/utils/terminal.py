"""Terminal output (results, log lines, progress bars, durations), and an immediate exit of the process."""

import contextlib
import datetime
import io
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from tqdm import tqdm

LOG_LEVELS = ("debug", "info", "warning", "error")

logger = logging.getLogger(__name__)
_LINE_SECONDS = 30
_LINE = "{desc}: {percentage:3.0f}% of {total_fmt}{unit}, {elapsed} done, {remaining} left, {rate_fmt}{postfix}"
_LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} in {elapsed}, {rate_fmt}{postfix}"
# Control characters except tab and newline, bidirectional overrides, Unicode line separators and surrogates. Text from
# a file could use them to hide or forge terminal output.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Replaces control characters, except tabs and newlines, by escape sequences such as `\x1b`."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def show(text: object, file: TextIO | None = None) -> None:
    """Prints a text with control characters escaped, to `file` (default: standard output)."""
    print(printable(str(text)), file=file or sys.stdout)


def exit_at_once(code: int) -> NoReturn:
    """Ends the process without waiting for threads and without exit handlers, such as JAX's barrier of all hosts."""
    with contextlib.suppress(OSError):  # The reader of the output may have exited.
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _StderrHandler(logging.Handler):
    """Handler that writes each record as one line to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not is_first():
            return
        try:
            # `tqdm.write` prints above the progress bars instead of into them.
            tqdm.write(printable(self.format(record)), file=sys.stderr)
            sys.stderr.flush()
        except OSError:
            # Continue if the terminal was closed.
            pass


def configure_logging(level: str = "info") -> None:
    """Writes the package's log records of at least `level` to standard error."""
    logger = logging.getLogger("bertjax")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        logger.propagate = False
    logger.setLevel(level.upper())


def format_table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Formats rows of (name, value, unit) as a table. Values are aligned to the right."""
    name_width = max(len(name) for name, _, _ in rows)
    value_width = max(len(value) for _, value, _ in rows)
    return "\n".join(f"{name:<{name_width}}  {value:>{value_width}}  {unit}".rstrip() for name, value, unit in rows)


def progress_bar(
    description: str, total: int | None, unit: str, shown: bool = True, after_seconds: float = 0, done: int = 0
) -> tqdm:
    """Returns a progress bar on standard error of host 0.

    `done` is the initial count. If `total` is None, the remaining time is not shown. `unit` is printed
    directly after each count, such as `B` or ` modules`. In a terminal, the bar appears after `after_seconds`.
    Elsewhere, the bar logs a line every 30 seconds.
    """
    settings: dict[str, Any] = {"total": total, "initial": done, "desc": description, "unit": unit, "unit_scale": True}
    settings["disable"] = not (shown and is_first())
    if sys.stderr.isatty():
        return tqdm(**settings, delay=after_seconds, mininterval=0.5, dynamic_ncols=True)
    # With smoothing=0, the rate is the average since the start.
    return _ProgressLines(
        **settings,
        delay=_LINE_SECONDS,
        mininterval=_LINE_SECONDS,
        miniters=1,
        smoothing=0,
        bar_format=_LINE if total else _LINE_WITHOUT_TOTAL,
        file=io.StringIO(),
        leave=False,
    )


class _ProgressLines(tqdm):
    """Progress bar that writes log lines."""

    # Disable tqdm's monitor thread, which refreshes bars, so that only `update` logs lines.
    monitor_interval = 0

    def refresh(self, *_: Any, **__: Any) -> None:
        # Do not hold tqdm's lock here. The log handler acquires its own lock first and then tqdm's, so the opposite
        # order could deadlock.
        if not self.disable:
            logger.info(str(self))


def duration(seconds: float) -> str:
    """Formats a duration as hours, minutes and seconds (1:02:03), or with days (4 days, 1:02:03)."""
    return str(datetime.timedelta(seconds=round(seconds)))


def is_first() -> bool:
    """Returns whether this is process 0 or the only process of a run. Does not initialize a backend."""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0
