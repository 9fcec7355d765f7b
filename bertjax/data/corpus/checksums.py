"""Verification of SHA-256 checksums in a background thread, once per file."""

import hashlib
import logging
import threading
from collections import deque
from pathlib import Path

from bertjax.errors import BertjaxError

logger = logging.getLogger(__name__)

_SECONDS_BEFORE_LOG = 3


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Checksums:
    """Files and their expected SHA-256.

    One background thread verifies each file once. Reading and hashing release the GIL, so other threads keep running.
    """

    def __init__(self) -> None:
        self._paths: set[Path] = set()
        self._pending: deque[tuple[Path, str, str]] = deque()
        self._error: BertjaxError | None = None
        self._thread: threading.Thread | None = None

    def add(self, path: Path, sha256: str, remedy: str) -> None:
        """Adds a file to verify, unless it was added before.

        Args:
          path: file to read.
          sha256: expected digest in hexadecimal.
          remedy: advice for the error message, for example "delete it".
        """
        if path not in self._paths:
            self._paths.add(path)
            self._pending.append((path, sha256, remedy))

    def verify_in_background(self) -> None:
        """Starts verifying the files added so far, unless the thread is already running."""
        if self._pending and not (self._thread and self._thread.is_alive()):
            # An interrupted command exits without waiting for a daemon thread.
            self._thread = threading.Thread(target=self._verify, name="checksums", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises the error of the background thread, if it has found a damaged file.

        Raises:
          BertjaxError: a file is damaged or cannot be read.
        """
        if self._error:
            raise self._error

    def wait(self) -> None:
        """Verifies all remaining files and waits for the result. Raises the same error as `check`."""
        self.check()
        while self._pending or (self._thread and self._thread.is_alive()):
            self.verify_in_background()
            self._thread.join(_SECONDS_BEFORE_LOG)
            if self._thread.is_alive():
                logger.info("verifying the checksums of the data")
                self._thread.join()
            self.check()

    def _verify(self) -> None:
        try:
            while self._pending:
                path, sha256, remedy = self._pending.popleft()
                if file_sha256(path) != sha256:
                    raise BertjaxError(f"{path} is damaged: its SHA-256 differs from the stored one; {remedy}")
        except OSError as error:
            self._error = BertjaxError(f"cannot read {path}: {error.strerror or error}; check the disk, then run again")
        except BertjaxError as error:
            self._error = error
