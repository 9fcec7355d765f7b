"""Temporary folders that are gone when the process is, however it ends."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

# No other process's, not even of one in another container that shares the place; a forked child knows it too.
_PREFIX = f"bertjax-{os.urandom(8).hex()}-"


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def find_place() -> None:
    """Chooses the place for them, which is tried with a file; later an interruption might leave that behind."""
    with contextlib.suppress(OSError):
        tempfile.gettempdir()


def remove_temporary_folders() -> None:
    """Removes all of this process, which ends without leaving its blocks."""
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)
