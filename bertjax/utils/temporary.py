"""Temporary files that are gone when the process is, however it ends."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_PREFIX = "bertjax-"
_OWN = ".process"


def own_place() -> Callable[[], None]:
    """Makes a folder and has this process, its libraries too, put all temporary files there.

    TensorFlow and others remove theirs at an end that the interpreter sees, not where the process is killed.

    Returns:
      A function that removes the folder; for this process, or a forked one that outlives it.
    """
    with contextlib.suppress(OSError):
        folder = tempfile.mkdtemp(prefix=_PREFIX, suffix=_OWN)
        tempfile.tempdir = folder
        return lambda: shutil.rmtree(folder, ignore_errors=True)
    return lambda: None


def shared_place() -> Path:
    """The folder for temporary files of all processes."""
    place = Path(tempfile.gettempdir())
    return place.parent if place.name.endswith(_OWN) else place


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
