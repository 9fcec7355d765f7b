"""Log lines on standard error, from host 0 of a run, above any progress bar."""

import logging
import sys

from tqdm import tqdm

from bertjax.utils.terminal import is_first, printable

LEVELS = ("debug", "info", "warning", "error")


class _StderrHandler(logging.Handler):
    """Writes each record as one line to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        if is_first():
            # Above the progress bars, if any.
            tqdm.write(printable(self.format(record)), file=sys.stderr)
            sys.stderr.flush()


def configure(level: str = "info") -> None:
    """Sends the package's log records of at least `level` to standard error."""
    logger = logging.getLogger("bertjax")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        logger.propagate = False
    logger.setLevel(level.upper())
