"""Recording of log messages, for the fixture `log_lines` and for fixtures that several tests share."""

import contextlib
import logging
from collections.abc import Iterator


class _ListHandler(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def recorded_log() -> Iterator[list[str]]:
    """Yields the list of messages that the package logs inside the `with` block."""
    lines: list[str] = []
    logger, handler = logging.getLogger("bertjax"), _ListHandler(lines)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
