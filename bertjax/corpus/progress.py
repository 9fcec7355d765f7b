"""The one look of a progress bar."""

import sys

from tqdm import tqdm


def progress_bar(
    what: str, total: int | None, unit: str, shown: bool = True, after_seconds: float = 0, done: int = 0
) -> tqdm:
    """A bar on standard error with rate and time left; in a log file a line every half minute.

    Args:
      what: is going on.
      total: of units; None where not known, which leaves out the time left.
      unit: of the rate, such as `B` or ` modules`.
      shown: False is a bar that shows nothing.
      after_seconds: what ends sooner shows nothing either.
      done: units of the total that were done before.
    """
    return tqdm(
        total=total,
        initial=done,
        desc=what,
        unit=unit,
        unit_scale=True,
        disable=not shown,
        delay=after_seconds,
        mininterval=0.5 if sys.stderr.isatty() else 30,
        dynamic_ncols=True,
    )
