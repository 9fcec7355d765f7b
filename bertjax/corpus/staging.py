"""A directory that appears under its name when it is whole, and not before."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from bertjax.errors import BertjaxError, UsageError


@contextlib.contextmanager
def staged(output: Path, overwrite: bool, what: str, is_one: Callable[[Path], bool]) -> Iterator[Path]:
    """A directory beside `output` that takes its place when the block ends well, and vanishes when it does not.

    A killed run leaves the hidden directory `.NAME.partial`, which the next run of the same output clears.

    Args:
      output: is made, with its parents.
      overwrite: replaces what is there, if it is one of the same kind.
      what: it is, for messages, such as `corpus`.
      is_one: tells whether something is of that kind.

    Raises:
      UsageError: something is at `output` already, or another run is writing it.
      BertjaxError: the disk is full or not writable.
    """
    partial = output.with_name(f".{output.name}.partial")
    old = output.with_name(f".{output.name}.old")
    if old.exists() and not output.exists():
        old.rename(output)  # Killed between the two renames below.
    _check_free(output, overwrite, what, is_one)
    lock = None
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _claim(partial, output)
        shutil.rmtree(old, ignore_errors=True)
        yield partial
        for path in (*partial.rglob("*"), partial):
            _sync(path)
        if output.exists():
            output.rename(old)
        partial.rename(output)
        _sync(output.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise BertjaxError(
            f"cannot write the {what} {output}: {error.strerror or error}; nothing was left there"
        ) from error
    finally:
        if lock is not None:
            shutil.rmtree(partial, ignore_errors=True)
            os.close(lock)


def _check_free(output: Path, overwrite: bool, what: str, is_one: Callable[[Path], bool]) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not is_one(output):
        raise UsageError(f"{output} exists and is no {what} to replace; choose another place")
    if not overwrite:
        raise UsageError(f"there is one at {output} already; give --overwrite, or another place")


def _claim(partial: Path, output: Path) -> int:
    """Makes the staging directory, empty and locked; the lock ends with this process, however it ends."""
    while True:
        partial.mkdir(exist_ok=True)
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise UsageError(f"another process is writing {output} at this moment; wait for it") from None
        if partial.exists() and os.path.samestat(os.fstat(lock), partial.stat()):
            break
        os.close(lock)  # Its owner finished or cleared it between the two calls.
    for path in partial.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return lock


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
