"""Files read and written whole, on this machine and, by their address (`gs://...`), elsewhere.

Nothing is written through a link that someone else put there: what is unfinished has a name that cannot be guessed and
is made by the call that names it. Nothing is read that has no end.
"""

import contextlib
import errno
import io
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from etils import epath

from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.temporary import temporary_folder

# Largest file of each kind that is read into memory.
JSON_BYTES = 64 << 20  # configs, manifests, tokenizer.json, the index of weights in several files
VOCABULARY_BYTES = 256 << 20  # vocab.txt, SentencePiece models
TABLE_BYTES = 8 << 30  # examples of a task, texts to embed
_UNFINISHED = re.compile(r"\.(.+)-[0-9a-f]{16}\.unfinished")
_NAME_CHARACTERS = 100
_COPY_BYTES = 1 << 24
_ABANDONED_AFTER_SECONDS = 3600
# Left for everything else that writes to the same disk.
_SPARE_BYTES = 16 << 20

_Path = TypeVar("_Path", Path, epath.Path)


def unfinished_name(name: str) -> str:
    """A hidden name, new at every call, for what will be `name` when it is finished."""
    return f".{name[:_NAME_CHARACTERS]}-{secrets.token_hex(8)}.unfinished"


def is_unfinished(name: str, of: str | None = None) -> bool:
    """Whether `unfinished_name` may have made a name, for any other or for a certain one."""
    found = _UNFINISHED.fullmatch(name)
    return found is not None and (of is None or found[1] == of[:_NAME_CHARACTERS])


@contextlib.contextmanager
def replacing(path: _Path) -> Iterator[_Path]:
    """A file beside `path` that takes its place at the end, or is removed if something goes wrong before.

    Safe where several processes write the same path: each has a file of its own, the last to finish stays.

    Args:
      path: of this machine.

    Raises:
      OSError: the file cannot be made.
    """
    unfinished = path.parent / unfinished_name(path.name)
    _make(unfinished)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path | epath.Path) -> Iterator[Path]:
    """A file of this machine that becomes `path`, here or elsewhere, at the end, or is removed, as by `replacing`.

    Raises:
      OSError: it cannot be made.
    """
    if not is_remote(path):
        with replacing(path) as unfinished:
            yield unfinished
        return
    with temporary_folder() as folder:
        yield folder / path.name
        copy_elsewhere(folder / path.name, path)


def write_at_once(path: Path | epath.Path, content: str | bytes) -> None:
    """As `write_atomic`, with the error as it is.

    Raises:
      OSError: it cannot be written.
    """
    with writing(path) as here:
        here.write_bytes(content.encode() if isinstance(content, str) else content)


def copy_elsewhere(here: Path, path: epath.Path) -> None:
    """Copies a file of this machine to an address, where it appears when it is whole, as objects do."""
    with open(here, "rb") as source, path.open("wb") as target:
        # Else there would be no object where the file is empty.
        target.write(b"")
        shutil.copyfileobj(source, target, _COPY_BYTES)


def path_of(name: str | os.PathLike) -> Path | epath.Path:
    """The path that a name is, here or elsewhere."""
    return epath.Path(name) if is_remote(name) else Path(name)


def _make(path: os.PathLike) -> None:
    # With the permissions that the user's umask gives to new files; never an existing file, never through a link.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))


def write_atomic(path: _Path, content: str | bytes) -> _Path:
    """Writes a file, text as UTF-8, so that a reader, or a kill at any moment, finds the old one or the new.

    Returns:
      Its path.

    Raises:
      BertjaxError: it cannot be written.
    """
    try:
        write_at_once(path, content)
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an `.npz` file, whole or not at all.

    Raises:
      BertjaxError: it cannot be written, or there is no room for it.
    """
    check_space(path.parent, sum(array.nbytes for array in arrays.values()), str(path))
    try:
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {error.strerror or error}") from error


def unfinished_files(folder: Path) -> list[Path]:
    """What processes of this user are writing in a folder with `replacing`, or were when they were killed."""
    with os.scandir(folder) as entries:
        return [
            Path(entry.path)
            for entry in entries
            if is_unfinished(entry.name)
            and entry.is_file(follow_symlinks=False)
            and is_ours(entry.stat(follow_symlinks=False))
        ]


def remove_abandoned(folder: Path, written_alone: str | None = None) -> None:
    """Removes what killed processes left in a folder; a live one writes to its file all the time.

    Args:
      written_alone: name of what no other process writes now; what is left of it is removed however new.
    """
    for file in unfinished_files(folder):
        with contextlib.suppress(OSError):
            old = time.time() - file.stat().st_mtime > _ABANDONED_AFTER_SECONDS
            if old or (written_alone is not None and is_unfinished(file.name, written_alone)):
                file.unlink()


def check_writable(folder: _Path) -> None:
    """Raises an OSError if no file can be made in a folder."""
    probe = folder / unfinished_name("probe")
    if is_remote(folder):
        probe.write_bytes(b"")
    else:
        _make(probe)
    probe.unlink()


def is_ours(found: os.stat_result) -> bool:
    """Whether a file or folder belongs to the user of this process."""
    return found.st_uid == os.geteuid()


def is_remote(path: os.PathLike | str) -> bool:
    """Whether a path is an address such as `gs://bucket/run`."""
    return "://" in os.fspath(path)


def open_regular(path: os.PathLike) -> IO[bytes]:
    """Opens a regular file of this machine; a pipe, a device or a folder could be read for ever, or not at all.

    Raises:
      UsageError: it is something else.
      OSError: it cannot be opened.
    """
    # Without waiting, which a pipe that nobody writes to would have us do.
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(mode := os.fstat(opened).st_mode):
        os.close(opened)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise UsageError(f"{os.fspath(path)} is no regular file; give one that can be read to an end")
    return open(opened, "rb")


def read_whole(path: os.PathLike, most_bytes: int) -> bytes:
    """The content of a regular file that is to be held in memory.

    Args:
      path: a local path, or an `epath.Path` with its address.
      most_bytes: a file of that kind may have.

    Raises:
      UsageError: it is no regular file, or larger than any of its kind.
      OSError: it cannot be read.
    """
    if is_remote(path):
        with epath.Path(path).open("rb") as file:
            return read_stream(file, path, most_bytes)
    with open_regular(path) as file:
        return read_stream(file, path, most_bytes)


def read_stream(file: IO[bytes], path: os.PathLike, most_bytes: int) -> bytes:
    """What is left of an open file, which may be one that is decompressed as it is read.

    Raises:
      UsageError: it is larger than `most_bytes`.
    """
    held = io.BytesIO()
    while block := file.read(min(1 << 24, most_bytes + 1 - held.tell())):
        held.write(block)
        if held.tell() > most_bytes:
            raise UsageError(
                f"{os.fspath(path)} has more than {most_bytes / 1e6:,.0f} MB, too much for what it is to be"
            )
    return held.getvalue()


def read_text(path: os.PathLike, most_bytes: int) -> str:
    """The content of a text file in UTF-8, line ends of any kind as one LF; errors as `read_whole`, and ValueError."""
    return read_whole(path, most_bytes).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: os.PathLike) -> Any:
    """The content of a JSON file.

    Raises:
      UsageError: it is no regular file, or too large.
      OSError: it cannot be read.
      ValueError: it is no JSON, or no UTF-8.
    """
    try:
        return json.loads(read_whole(path, JSON_BYTES).decode("utf-8"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_object(path: os.PathLike) -> dict[str, Any]:
    """The content of a JSON file that holds an object; raises as `read_json`."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    return content


def check_space(folder: os.PathLike, needed_bytes: float, what: str, remedy: str = "choose another place") -> None:
    """Refuses to begin writing what the disk has no room for; an address elsewhere is taken to have room.

    Args:
      folder: to write to; the nearest that exists counts.
      needed_bytes: of what is to be written, or a low guess at them.
      what: is to be written, for the message.
      remedy: besides freeing space.

    Raises:
      BertjaxError: there is less.
    """
    if is_remote(folder):
        return
    place = Path(os.path.abspath(folder))
    while not place.exists():
        place = place.parent
    total, _, free = shutil.disk_usage(place)
    # What is no disk, such as /proc, has a size of 0; its own error says more.
    if total and needed_bytes + _SPARE_BYTES > free:
        raise BertjaxError(
            f"no room for {what}: about {needed_bytes / 1e6:,.0f} MB, the disk of {place} has {free / 1e6:,.0f} MB "
            f"free; free some space or {remedy}"
        )
