"""Log lines on standard error of host 0."""

import logging
import sys

from tqdm import tqdm

from bertjax.utils.terminal import is_first, printable

LOG_LEVELS = ("debug", "info", "warning", "error")


class _StderrHandler(logging.Handler):
    """Writes each record as one line to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not is_first():
            return
        try:
            # Writes above the progress bars.
            tqdm.write(printable(self.format(record)), file=sys.stderr)
            sys.stderr.flush()
        except OSError:
            # A run whose terminal has gone continues.
            pass


def configure_logging(level: str = "info") -> None:
    """Sends the package's log records of at least `level` to standard error."""
    logger = logging.getLogger("bertjax")
    if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
        logger.addHandler(_StderrHandler())
        logger.propagate = False
    logger.setLevel(level.upper())
