"""Atomic creation of directories, which appear under their final name only when they are complete."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from etils import epath
from filelock import FileLock, Timeout

from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import AnyPath, check_bucket, fsync, is_remote, temporary_name, temporary_paths


@contextlib.contextmanager
def atomic_directory(
    path: AnyPath, overwrite: bool, kind: str, is_kind: Callable[[AnyPath], bool], last_file: str = ""
) -> Iterator[AnyPath]:
    """Yields an empty directory that becomes `path` when the block succeeds, and is removed when it fails.

    A local directory is renamed into place. After a kill, the next call with the same `path` restores the old
    directory and removes the temporary directory. Object storage cannot rename directories, so files are moved one by
    one, and `last_file` is moved last.

    Args:
      path: directory to create; missing parents are created too.
      overwrite: whether to replace an existing directory of this kind.
      kind: kind of directory for messages, such as `corpus`.
      is_kind: function that returns whether a directory is of this kind and contains nothing else.
      last_file: name of the file that marks a `gs://` directory as complete.

    Raises:
      UsageError: `path` exists, or another process is writing to it.
      BertjaxError: the disk is full or not writable.
    """
    make = _remote_directory(path, last_file) if is_remote(path) else _local_directory(path)
    try:
        check_bucket(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext() if is_remote(path) else _directory_lock(path):
            if path.exists() and not (path.is_dir() and not any(path.iterdir())):
                if not is_kind(path):
                    raise UsageError(f"{path} exists and is not a {kind}, or contains other files; choose another path")
                if not overwrite:
                    raise UsageError(f"{path} exists; use --overwrite or choose another path")
            with make as directory:
                yield directory
    except (FileExistsError, NotADirectoryError) as error:
        raise UsageError(f"cannot create the {kind} {path}: a parent is a file; choose another path") from error
    except OSError as error:
        raise BertjaxError(f"cannot write the {kind} {path}: {error.strerror or error}; choose another path") from error


def recover_directory(path: Path) -> None:
    """Restores `path` and removes temporary directories if a process was killed inside `atomic_directory`."""
    if temporary_paths(path.parent, path.name):
        with _directory_lock(path):
            pass


@contextlib.contextmanager
def _directory_lock(path: Path) -> Iterator[None]:
    lock = path.parent / f".{path.name[:100]}.write.lock"
    try:
        with FileLock(lock, blocking=False):
            try:
                for temporary in temporary_paths(path.parent, path.name):
                    _discard(temporary, path)
                yield
            finally:
                # It is safe to remove the lock file: a waiting FileLock detects this and opens a new file.
                lock.unlink(missing_ok=True)
    except Timeout:
        raise UsageError(f"another process is writing to {path}; wait until it ends") from None


@contextlib.contextmanager
def _local_directory(path: Path) -> Iterator[Path]:
    temporary = path.parent / temporary_name(path.name)
    try:
        (temporary / "new").mkdir(parents=True)
        yield temporary / "new"
        for file in (*(temporary / "new").rglob("*"), temporary / "new"):
            fsync(file)
        if path.exists():
            path.rename(temporary / "old")
        (temporary / "new").rename(path)
        fsync(path.parent)
    finally:
        _discard(temporary, path)


@contextlib.contextmanager
def _remote_directory(path: epath.Path, last_file: str) -> Iterator[epath.Path]:
    temporary = path.parent / temporary_name(path.name)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if path.exists():
            (path / last_file).unlink(missing_ok=True)
            path.rmtree()
        files = sorted(temporary.iterdir(), key=lambda file: (file.name == last_file, file.name))
        # Create a placeholder, because object storage has no empty directories.
        placeholder = path / temporary_name(path.name)
        placeholder.write_bytes(b"")
        for file in files:
            file.replace(path / file.name)
        placeholder.unlink()
    finally:
        with contextlib.suppress(Exception):
            temporary.rmtree()


def _discard(temporary: Path, path: Path) -> None:
    """Restores the directory that a temporary directory was about to replace, and removes the temporary directory."""
    with contextlib.suppress(OSError):
        if (temporary / "old").is_dir() and not path.exists():
            (temporary / "old").rename(path)
    shutil.rmtree(temporary, ignore_errors=True)
