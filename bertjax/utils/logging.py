"""Logging to standard error on host 0."""

import logging
import sys

from tqdm import tqdm

from bertjax.utils.terminal import is_first, printable

LOG_LEVELS = ("debug", "info", "warning", "error")


class _StderrHandler(logging.Handler):
    """Handler that writes each record as one line to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        if not is_first():
            return
        try:
            # Use tqdm, which writes above the progress bars.
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
