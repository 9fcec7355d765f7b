"""Local and `gs://` files: JSON, checksums, atomic files and folders, encodings, free space, cache folder."""

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from etils import epath
from filelock import FileLock, Timeout

from bertjax.errors import BertjaxError, UsageError, first_line

AnyPath: TypeAlias = Path | epath.Path
_Path = TypeVar("_Path", bound=AnyPath)
CACHE_DIR_VARIABLE = "BERTJAX_STAGING"
# Free bytes that `check_free_space` leaves for other processes that write to the same disk.
_RESERVE_BYTES = 16 << 20
# Minimum age in seconds of temporary files that are assumed to be leftovers of killed processes.
_ABANDONED_SECONDS = 3600
# Control characters, which are rare in texts but make up 2 % or more of the start of compressed files and PDFs.
_CONTROLS, _START_BYTES = bytes({*range(32)} - {*b"\t\n\v\f\r\x1b"}), 8192
_CRS = re.compile(rb"\r+\n?")


def is_remote(path: os.PathLike | str) -> bool:
    """Returns whether a path is remote, such as `gs://bucket/run`."""
    return "://" in os.fspath(path)


def as_path(path: os.PathLike | str) -> AnyPath:
    """Returns an `epath.Path` for a remote path and a `pathlib.Path` for a local path."""
    return epath.Path(path) if is_remote(path) else Path(path)


def check_bucket(path: AnyPath) -> None:
    """Raises a BertjaxError if a path's bucket does not exist, because TensorFlow's `mkdir` would retry forever."""
    if is_remote(path) and not as_path("/".join(os.fspath(path).split("/")[:3])).exists():
        raise BertjaxError(f"the bucket of {path} does not exist; check its name, or create the bucket")


def read_json(path: os.PathLike | str) -> Any:
    """Returns the content of a JSON file."""
    try:
        return json.loads(as_path(path).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json_object(path: os.PathLike | str) -> dict[str, Any]:
    """Returns the object in a JSON file. Raises a ValueError if the file contains a different JSON value."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def temporary_name(name: str) -> str:
    """Returns a new hidden name for a file or folder that will be renamed to `name` when it is complete."""
    return f".{name[:100]}-{secrets.token_hex(8)}.unfinished"


def temporary_paths(folder: Path, name: str = "") -> list[Path]:
    """Lists temporary files and folders in `folder`, including leftovers of killed processes.

    `name` is the name of the final file or folder (default: "", all names).
    """
    return sorted(folder.glob(f".{glob.escape(name[:100]) or '*'}-{'[0-9a-f]' * 16}.unfinished"))


def remove_temporaries(folder: Path, name: str = "", min_age_seconds: float = 0) -> None:
    """Removes temporary files of `name` (default: "", all names) that are `min_age_seconds` old or older."""
    for file in temporary_paths(folder, name):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime >= min_age_seconds:
                file.unlink()


def reserve_blocks(file: AnyPath) -> None:
    """Reserves the disk blocks of a sparse file. Otherwise, writing to a memory map crashes when the disk is full."""
    if hasattr(os, "posix_fallocate"):
        with open(file, "rb+") as opened:
            try:
                os.posix_fallocate(opened.fileno(), 0, os.path.getsize(file))
            except OSError as error:  # The error has no file name.
                raise OSError(error.errno, error.strerror, str(file)) from error


@contextlib.contextmanager
def atomic_file(path: AnyPath) -> Iterator[Path]:
    """Yields a local temporary file that becomes `path` when the block succeeds, and is removed when it fails.

    Also removes temporary files that killed processes left for `path`, if these files are at least an hour old.

    For a `gs://` path, the file is uploaded, which is atomic: object storage shows only complete objects.
    """
    if is_remote(path):
        with tempfile.TemporaryDirectory(prefix="bertjax-") as folder:
            file = Path(folder, path.name)
            yield file
            epath.Path(file).copy(path, overwrite=True)
        return
    remove_temporaries(Path(path.parent), path.name, _ABANDONED_SECONDS)
    temporary = path.parent / temporary_name(path.name)
    temporary.touch(exist_ok=False)
    try:
        yield Path(temporary)
        fsync(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: _Path, content: str | bytes) -> _Path:
    """Writes a file atomically, with text as UTF-8, and returns its path. Raises a BertjaxError if this fails."""
    try:
        with atomic_file(path) as file:
            file.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {first_line(error)}") from error
    return path


def write_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an `.npz` file atomically. Raises a BertjaxError if this fails."""
    check_free_space(path.parent, sum(array.nbytes for array in arrays.values()), str(path))
    try:
        with atomic_file(path) as temporary, open(temporary, "wb") as file:
            # pyrefly reports that `**arrays` may contain `allow_pickle`, which is a bool in NumPy's stub.
            np.savez(file, **arrays)  # pyrefly: ignore[bad-argument-type]
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {first_line(error)}") from error


def file_sha256(path: Path) -> str:
    """Returns the SHA-256 of a file in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: AnyPath) -> None:
    """Flushes a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(
    path: AnyPath, overwrite: bool, kind: str, replaceable: Mapping[str, Sequence[str]], last_file: str = ""
) -> Iterator[AnyPath]:
    """Yields an empty folder that becomes `path` when the block succeeds, and is removed when it fails.

    A local folder is renamed to `path`. If the process is killed, the next call with the same `path` restores the
    folder that was to be replaced, and removes the temporary folder. Object storage cannot rename folders, so
    files are moved one by one, and `last_file` is moved last.

    `kind` describes the folder in messages, such as `corpus`. `replaceable` maps the name of a file that identifies
    such a folder, such as `manifest.json`, to patterns of all file names that the folder may contain. With `overwrite`,
    an existing folder is replaced only if it contains such a file and all its names match the patterns.
    """
    try:
        check_bucket(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext() if is_remote(path) else _folder_lock(Path(path)):
            names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
            if names or (path.exists() and not path.is_dir()):
                patterns = next((patterns for file, patterns in replaceable.items() if file in names), ())
                if not names or not all(any(fnmatch(name, pattern) for pattern in patterns) for name in names):
                    raise UsageError(f"{path} exists and is not a {kind}, or contains other files; choose another path")
                if not overwrite:
                    raise UsageError(
                        f"{path} exists; use --overwrite (in Python: overwrite=True) or choose another path"
                    )
            with (
                _remote_folder(epath.Path(path), last_file) if is_remote(path) else _local_folder(Path(path)) as folder
            ):
                yield folder
    except OSError as error:
        raise BertjaxError(f"cannot write the {kind} {path}: {first_line(error)}; choose another path") from error


def recover_folder(path: Path) -> None:
    """Restores `path` and removes temporary folders if a process was killed inside `atomic_folder`."""
    if temporary_paths(path.parent, path.name):
        with _folder_lock(path):
            pass


@contextlib.contextmanager
def _folder_lock(path: Path) -> Iterator[None]:
    """Locks a folder against other writers, and restores or removes leftovers of a killed writer."""
    lock = path.parent / f".{path.name[:100]}.write.lock"
    try:
        with FileLock(lock, blocking=False):
            try:
                for temporary in temporary_paths(path.parent, path.name):
                    _discard(temporary, path)
                yield
            finally:
                # Removing the lock file is safe: a FileLock that has it open detects the removal and gives up.
                lock.unlink(missing_ok=True)
    except Timeout:
        raise UsageError(f"another process is writing to {path}; wait until it ends") from None


@contextlib.contextmanager
def _local_folder(path: Path) -> Iterator[Path]:
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
def _remote_folder(path: epath.Path, last_file: str) -> Iterator[epath.Path]:
    temporary = path.parent / temporary_name(path.name)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if path.exists():
            (path / last_file).unlink(missing_ok=True)
            path.rmtree()
        files = sorted(temporary.iterdir(), key=lambda file: (file.name == last_file, file.name))
        # Create a placeholder, because object storage has no empty folders.
        placeholder = path / temporary_name(path.name)
        placeholder.write_bytes(b"")
        for file in files:
            file.replace(path / file.name)
        placeholder.unlink()
    finally:
        with contextlib.suppress(Exception):
            temporary.rmtree()


def _discard(temporary: Path, path: Path) -> None:
    """Restores the folder that a temporary folder was about to replace, and removes the temporary folder."""
    with contextlib.suppress(OSError):
        if (temporary / "old").is_dir() and not path.exists():
            (temporary / "old").rename(path)
    shutil.rmtree(temporary, ignore_errors=True)


def cache_dir() -> Path:
    """Creates and returns the local cache folder, `$BERTJAX_STAGING` (default: `bertjax-UID` in `$TMPDIR`)."""
    default = f"{tempfile.gettempdir()}/bertjax-{os.getuid()}"
    path = Path(os.environ.get(CACHE_DIR_VARIABLE) or default).expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BertjaxError(f"cannot create {path}: {error}; set {CACHE_DIR_VARIABLE} to another folder") from error
    return path


def make_output_folder(folder: Path) -> None:
    """Creates a folder. Raises a BertjaxError, before any work, if files cannot be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BertjaxError(f"cannot write to {folder}: {first_line(error)}; choose another folder") from error


def check_free_space(folder: os.PathLike | str, needed_bytes: float, what: str, remedy: str = "") -> None:
    """Raises a BertjaxError if a local disk has less than `needed_bytes` plus `_RESERVE_BYTES` free.

    The folder need not exist. In the message, `what` describes the files to write, and `remedy` is an alternative to
    freeing space (default: choose another path).
    """
    if is_remote(folder):
        return
    path = Path(folder).absolute()
    parent = next(each for each in (path, *path.parents) if each.exists())
    total, _, free = shutil.disk_usage(parent)
    needed_bytes += _RESERVE_BYTES
    # Ignore a size of 0, which pseudo file systems such as /proc report.
    if total and needed_bytes > free:
        raise BertjaxError(
            f"not enough disk space for {what}: {needed_bytes / 1e6:,.0f} MB needed, {free / 1e6:,.0f} MB free at "
            f"{parent}; free some space or {remedy or 'choose another path'}"
        )


def unreadable(path: os.PathLike | str, reason: str, fix: str = "copy it again") -> UsageError:
    """Returns the error for a damaged file. Raises a UsageError if the file is a Git LFS pointer."""
    with contextlib.suppress(OSError), as_path(path).open("rb") as file:
        reject_lfs_pointer(path, file.read(_START_BYTES))
    return UsageError(f"cannot read {path}: {reason}; {fix}")


def reject_lfs_pointer(path: os.PathLike | str, data: bytes) -> None:
    """Raises a UsageError if the data is a Git LFS pointer, which `git clone` writes if Git LFS is missing."""
    if data.startswith(b"version https://git-lfs.github.com/spec/"):
        raise UsageError(f"{path} is only a Git LFS pointer; run `git lfs pull` in its folder")


def reject_binary(path: os.PathLike | str, data: bytes) -> None:
    """Raises a UsageError if a file is UTF-16, UTF-32, not text (such as a compressed file), or a Git LFS pointer."""
    reject_lfs_pointer(path, data)
    if data.startswith((b"\xff\xfe", b"\xfe\xff", b"\0\0\xfe\xff")):
        raise UsageError(f"{path} is encoded in UTF-16 or UTF-32; convert it to UTF-8, for example with iconv")
    start = data[:_START_BYTES]
    if len(start) - len(start.translate(None, _CONTROLS)) > max(2, len(start) / 50):
        raise UsageError(f"{path} is not UTF-8 text: it has many control characters; decompress or convert it")


def decode_utf8(path: os.PathLike | str, data: bytes) -> str:
    """Decodes the content of a UTF-8 file. Raises a UsageError if it is not UTF-8, see also `reject_binary`."""
    reject_binary(path, data)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        fix = "convert the file, for example with iconv -f WINDOWS-1252 -t UTF-8"
        raise UsageError(f"{path} line {line} is not UTF-8; {fix}") from error


def unix_newlines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields the blocks of a UTF-8 text with LF instead of CR LF (Windows), CR CR LF (some tools) and CR (old Macs)."""
    pending_crs = b""
    for block in blocks:
        # Keep CRs at the end of the block for later, because the next block may start with the LF of a CR LF.
        complete = (pending_crs + block).rstrip(b"\r")
        pending_crs = (pending_crs + block)[len(complete) :]
        yield _CRS.sub(lambda crs: b"\n" if crs[0].endswith(b"\n") else b"\n" * len(crs[0]), complete)
    yield b"\n" * len(pending_crs)
