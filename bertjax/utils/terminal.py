"""What a person sees while a command works, and what it prints."""

import logging
import re
import sys
import time
from typing import Protocol, TextIO

from tqdm import tqdm

logger = logging.getLogger(__name__)
_LINE_SECONDS = 30
_LINE = "{desc}: {percentage:3.0f}% of {total_fmt}{unit}, {elapsed} done, {remaining} left, {rate_fmt}{postfix}"
_LINE_WITHOUT_TOTAL = "{desc}: {n_fmt}{unit} in {elapsed}, {rate_fmt}{postfix}"
# All control characters but tab and line end, what turns the direction of text, ends of lines and paragraphs of other
# kinds, and halves of characters. A terminal obeys some of them: text of a file could hide or forge what is shown.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""The text with everything that a terminal might obey as its code, such as `\x1b`; tabs and line ends stay."""
    return _OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def show(text: object, file: TextIO | None = None) -> None:
    """Prints a result, on standard output unless told otherwise."""
    print(printable(str(text)), file=file or sys.stdout)


class Bar(Protocol):
    """How far something is."""

    def update(self, n: float = 1) -> object:
        """So many units more are done."""

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        """What stands behind the numbers."""

    def close(self) -> None:
        """It is over."""

    def __enter__(self) -> "Bar": ...

    def __exit__(self, *_: object) -> object: ...


def progress_bar(
    what: str, total: int | None, unit: str, shown: bool = True, after_seconds: float = 0, done: int = 0
) -> Bar:
    """A bar on standard error with rate and time left; a line every half minute where that is no terminal.

    Args:
      what: is going on.
      total: of units; None where not known, which leaves out the time left.
      unit: of the rate, such as `B` or ` modules`.
      shown: False is a bar that shows nothing; those of other processes than the first never do.
      after_seconds: what ends sooner shows nothing either.
      done: units of the total that were done before.
    """
    shown = shown and is_first()
    if shown and not sys.stderr.isatty():
        return _Lines(what, total, unit, done)
    return tqdm(
        total=total,
        initial=done,
        desc=what,
        unit=unit,
        unit_scale=True,
        disable=not shown,
        delay=after_seconds,
        mininterval=0.5,
        dynamic_ncols=True,
    )


class _Lines:
    """Says how far something is from time to time."""

    def __init__(self, what: str, total: int | None, unit: str, done: int) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._before = self._done = done
        self._postfix = ""
        self._started = self._said = time.monotonic()

    def update(self, n: float = 1) -> None:
        self._done += n
        now = time.monotonic()
        if now - self._said >= _LINE_SECONDS:
            self._said = now
            text = tqdm.format_meter(
                self._done,
                self._total,
                now - self._started,
                prefix=self._what,
                unit=self._unit,
                unit_scale=True,
                initial=self._before,
                postfix=self._postfix,
                bar_format=_LINE if self._total else _LINE_WITHOUT_TOTAL,
            )
            logger.info(text)

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self._postfix = text

    def close(self) -> None: ...

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03, after the days where there are any: 4 d 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{f'{days:,} d ' if days else ''}{hours}:{minutes:02d}:{seconds:02d}"


def is_first() -> bool:
    """Whether this is the first process of a run, or the only one; does not start a backend to find out."""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0
