"""Recording of log messages, for the fixture `log_lines` and for fixtures that several tests share."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def recorded_log() -> Iterator[list[str]]:
    """Yields the list of messages that the package logs inside the `with` block."""
    lines: list[str] = []
    logger, handler = logging.getLogger("bertjax"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
