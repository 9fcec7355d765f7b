"""Functions for local and `gs://` files: JSON, atomic writes, text encodings, free space and the cache directory."""

import contextlib
import glob
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from etils import epath

from bertjax.errors import BertjaxError, UsageError

AnyPath: TypeAlias = Path | epath.Path
CACHE_DIR_VARIABLE = "BERTJAX_STAGING"
_COPY_BYTES = 1 << 24
# Free bytes that `check_free_space` leaves for other processes that write to the same disk.
_RESERVE_BYTES = 16 << 20


def is_remote(path: os.PathLike | str) -> bool:
    """Returns whether a path is a URL such as `gs://bucket/run`."""
    return "://" in os.fspath(path)


def as_path(path: os.PathLike | str) -> AnyPath:
    """Returns an `epath.Path` for a URL and a `pathlib.Path` for a local path."""
    return epath.Path(path) if is_remote(path) else Path(path)


def check_bucket(path: AnyPath) -> None:
    """Raises a BertjaxError if the bucket of a URL does not exist, since TensorFlow's `mkdir` would retry forever."""
    if is_remote(path) and not as_path("/".join(os.fspath(path).split("/")[:3])).exists():
        raise BertjaxError(f"no bucket for {path}; check the name of the bucket, or create it")


def read_json(path: os.PathLike | str) -> Any:
    """Returns the content of a JSON file."""
    try:
        return json.loads(as_path(path).read_bytes().decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json_object(path: os.PathLike | str) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises a ValueError if the file contains a different JSON value."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def temporary_name(name: str) -> str:
    """Returns a new hidden name for a file or directory that will be renamed to `name` when it is complete."""
    return f".{name[:100]}-{secrets.token_hex(8)}.unfinished"


def temporary_paths(directory: Path, name: str = "") -> list[Path]:
    """Returns the temporary paths of `name` (default: of any name) that belong to running or killed processes."""
    return sorted(directory.glob(f".{glob.escape(name[:100]) or '*'}-{'[0-9a-f]' * 16}.unfinished"))


def remove_temporaries(directory: Path, name: str = "", min_age_seconds: float = 0) -> None:
    """Removes temporary files of `name` (default: of any name) older than `min_age_seconds`."""
    for file in temporary_paths(directory, name):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime >= min_age_seconds:
                file.unlink()


@contextlib.contextmanager
def atomic_file(path: AnyPath) -> Iterator[Path]:
    """Yields a local temporary file that becomes `path` when the block succeeds, and is removed when it fails.

    A local file is renamed into place. A `gs://` object is uploaded, since object storage shows only complete objects.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory(prefix="bertjax-") as directory:
            file = Path(directory, path.name)
            yield file
            upload(file, path)
        return
    temporary = path.parent / temporary_name(path.name)
    # With O_EXCL, an existing file is never opened. The mode 0o666 is reduced by the user's umask.
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        yield Path(temporary)
        fsync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: AnyPath, content: str | bytes) -> AnyPath:
    """Writes a file atomically, with text as UTF-8, and returns its path.

    Raises:
      BertjaxError: the file cannot be written.
    """
    try:
        with atomic_file(path) as file:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an `.npz` file atomically. Raises a BertjaxError if the disk has no room for the file."""
    check_free_space(path.parent, sum(array.nbytes for array in arrays.values()), str(path))
    try:
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {error.strerror or error}") from error


def upload(source: Path, target: epath.Path) -> None:
    """Copies a local file to object storage."""
    with open(source, "rb") as local, target.open("wb") as remote:
        # Write at least once, because otherwise an empty file would not create an object.
        remote.write(b"")
        shutil.copyfileobj(local, remote, _COPY_BYTES)


def fsync(path: Path) -> None:
    """Flushes a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_dir() -> Path:
    """Returns the directory of the machine's caches, `$BERTJAX_STAGING` (default: `bertjax-UID` in `$TMPDIR`)."""
    default = f"{tempfile.gettempdir()}/bertjax-{os.getuid()}"
    path = Path(os.environ.get(CACHE_DIR_VARIABLE) or default).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BertjaxError(
            f"cannot create {path}: {error.strerror}; set {CACHE_DIR_VARIABLE} to a different directory"
        ) from error
    return path


def check_free_space(directory: os.PathLike | str, needed_bytes: float, what: str, remedy: str = "") -> None:
    """Raises a BertjaxError if the disk of a local directory has less than `needed_bytes` free.

    Args:
      directory: directory to write to; if it does not exist, the nearest existing parent is checked.
      needed_bytes: size of the files to write.
      what: description of the files for the message.
      remedy: alternative to freeing space, for the message (default: choose another path).
    """
    if is_remote(directory):
        return
    parent = Path(directory).absolute()
    while not parent.exists():
        parent = parent.parent
    total, _, free = shutil.disk_usage(parent)
    needed_bytes += _RESERVE_BYTES
    # Ignore a size of 0, which pseudo file systems such as /proc report.
    if total and needed_bytes > free:
        raise BertjaxError(
            f"not enough disk space for {what}: {needed_bytes / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free at "
            f"{parent}; free some space or {remedy or 'choose another path'}"
        )


def reject_utf16(path: os.PathLike | str, data: bytes) -> None:
    """Raises a UsageError if a text file is UTF-16 or UTF-32, with or without a byte-order mark.

    Args:
      path: file name for the message.
      data: first bytes or all bytes of the file.
    """
    start, encoding = data[:4096], ""
    if start.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        encoding = "UTF-32"
    elif start.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "UTF-16"
    elif len(start) >= 8:
        # In UTF-16, nearly every second byte of English text is NUL, while UTF-8 text contains no NUL.
        for name, high_bytes in (("UTF-16BE", start[0::2]), ("UTF-16LE", start[1::2])):
            if high_bytes.count(0) > 0.4 * len(high_bytes) and start.count(0) == high_bytes.count(0):
                encoding = name
    if encoding:
        raise UsageError(f"{path} is encoded in {encoding}; convert it with `iconv -f {encoding} -t UTF-8`")


def normalize_newlines(data: bytes) -> bytes:
    """Replaces carriage returns by line feeds if lines end with carriage returns only."""
    return data if b"\n" in data else data.replace(b"\r", b"\n")
