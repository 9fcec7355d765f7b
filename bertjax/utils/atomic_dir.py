"""A directory that appears under its name when it is whole, and not before."""

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath

from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import is_ours, is_unfinished, unfinished_name

# What tells a directory that this program made, and may clear away, from any other of such a name.
_MARKER = "bertjax-unfinished"
_NEW, _OLD = "new", "old"
# Of a process that ends, for what its other threads still write.
_MOST_CLEARINGS, _CLEARING_SECONDS = 40, 0.05
# Of this process, where a directory is being made and what it will be.
_under_way: dict[Path, Path] = {}


@contextlib.contextmanager
def staged(output: Path, overwrite: bool, what: str, is_one: Callable[[Path], bool]) -> Iterator[Path]:
    """A directory that takes the place of `output` when the block ends well, and vanishes when it does not.

    It lies in a hidden directory beside `output`, as does what is replaced until that is done. A killed run leaves it;
    the next run of the same output puts back what was being replaced and clears it away, if it is ours.

    Args:
      output: is made, with its parents.
      overwrite: replaces what is there, if it is one of the same kind.
      what: it is, for messages, such as `corpus`.
      is_one: tells whether something is of that kind.

    Raises:
      UsageError: something is at `output` already, or another run is writing it.
      BertjaxError: the disk is full or not writable.
    """
    try:
        clear_leftovers(output)
        _check_free(output, overwrite, what, is_one)
        output.parent.mkdir(parents=True, exist_ok=True)
        with _staging(output) as staging:
            # Again, now that others see ours: of two runs that begin at once one at least gives way.
            clear_leftovers(output, except_for=staging)
            new = staging / _NEW
            new.mkdir()
            yield new
            for path in (*new.rglob("*"), new):
                _sync(path)
            if output.exists():
                output.rename(staging / _OLD)
            new.rename(output)
            _sync(output.parent)
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"{output} cannot be the {what}: there is a file in its path; choose another place") from error
    except OSError as error:
        raise BertjaxError(
            f"cannot write the {what} {output}: {error.strerror or error}; nothing was left there"
        ) from error


@contextlib.contextmanager
def staged_elsewhere(
    output: epath.Path, overwrite: bool, what: str, is_one: Callable[[epath.Path], bool], last: str
) -> Iterator[epath.Path]:
    """As `staged`, for a folder of object storage, which knows neither folders nor a way to rename one.

    Its files are moved into place one by one when the block ends well, and `last` last: where that is, the folder is
    whole. What is replaced goes then, `last` first. A killed run leaves its unfinished folder behind.

    Args:
      last: name of a file without which nobody takes the folder for one.
      Others as of `staged`.

    Raises:
      UsageError: something is at `output` already.
      BertjaxError: storage refuses.
    """
    _check_free(output, overwrite, what, is_one)
    new = output.parent / unfinished_name(output.name)
    try:
        new.mkdir(parents=True)
        yield new
        if output.exists():
            (output / last).unlink(missing_ok=True)
            output.rmtree()
        files = sorted(new.iterdir(), key=lambda file: (file.name == last, file.name))
        output.mkdir(parents=True, exist_ok=True)
        # Where there are only names with slashes, a folder is there while there is something in it, and not before.
        first = output / unfinished_name(output.name)
        first.write_bytes(b"")
        for file in files:
            file.replace(output / file.name)
        first.unlink()
    except OSError as error:
        raise BertjaxError(f"cannot write the {what} {output}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(Exception):
            new.rmtree()


def _check_free(output: Path | epath.Path, overwrite: bool, what: str, is_one: Callable[..., bool]) -> None:
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not is_one(output):
        raise UsageError(f"{output} exists and is no {what} to replace, or holds more than that; choose another place")
    if not overwrite:
        raise UsageError(f"there is one at {output} already; give --overwrite, or another place")


@contextlib.contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A new directory beside `output`, locked; the lock ends with this process, however it ends."""
    staging = output.parent / unfinished_name(output.name)
    lock = None
    try:
        # It may not be there before, and nobody else may put anything into it.
        _under_way[staging] = output
        staging.mkdir(mode=0o700)
        try:
            lock = _open_folder(staging)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (staging / _MARKER).touch()
        except (BlockingIOError, FileNotFoundError):
            # Another run took it for an empty one that was left.
            raise _in_use(output) from None
        yield staging
        # Else a thread of a library may be writing still; what it leaves is cleared when the process ends.
        del _under_way[staging]
    finally:
        _clear(staging, output)
        if lock is not None:
            os.close(lock)


def clear_under_way() -> None:
    """Clears what this process is making, before it ends at once; other threads may be at it, or write there."""
    for staging, output in list(_under_way.items()):
        places, looks = [staging], 0
        # Libraries go on writing in threads of theirs, and make folders anew that they find missing.
        for _ in range(_MOST_CLEARINGS):
            looks = 0 if any(place.exists() for place in places) else looks + 1
            if looks == 2:
                break
            # Nothing that is half cleared can come to its name any more.
            aside = output.parent / unfinished_name(output.name)
            with contextlib.suppress(OSError):
                staging.rename(aside)
                places.append(aside)
            for place in places:
                _clear(place, output)
            time.sleep(_CLEARING_SECONDS)


def clear_leftovers(output: Path, except_for: Path | None = None) -> None:
    """Clears what killed runs of the same output left.

    Raises:
      UsageError: a run that left something is still going on.
    """
    if not output.parent.is_dir():
        return
    for found in [path for path in output.parent.iterdir() if is_unfinished(path.name, output.name)]:
        if found == except_for:
            continue
        try:
            handle = _open_folder(found)
        except OSError:  # Gone meanwhile, a link, or no folder.
            continue
        try:
            # A run that is killed before it marks its directory leaves it empty.
            if is_ours(os.fstat(handle)) and (_is_marked(handle) or not os.listdir(handle)):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(found, output)
        except BlockingIOError:
            raise _in_use(output) from None
        finally:
            os.close(handle)


def _in_use(output: Path) -> UsageError:
    return UsageError(f"another process is writing {output} at this moment; wait for it")


def _is_marked(folder: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(_MARKER, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _clear(staging: Path, output: Path) -> None:
    """Removes a staging directory, the mark last, after putting back what is between its two renames."""
    old = staging / _OLD
    with contextlib.suppress(OSError):
        if old.is_dir() and not old.is_symlink() and not output.exists():
            old.rename(output)
        for path in (staging / _NEW, old):
            if path.is_symlink():
                path.unlink()
            shutil.rmtree(path, ignore_errors=True)
        (staging / _MARKER).unlink(missing_ok=True)
        staging.rmdir()


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
