"""Files that are either whole or not there."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from bertjax.errors import BertjaxError

UNFINISHED_SUFFIX = ".unfinished"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place at the end, or is removed if something goes wrong before.

    Safe where several processes write the same path: each has a file of its own, the last to finish stays.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-", suffix=UNFINISHED_SUFFIX)
    os.close(handle)
    unfinished = Path(name)
    try:
        yield unfinished
        # mkstemp makes the file readable for its owner only.
        unfinished.chmod(0o644)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an `.npz` file, whole or not at all.

    Raises:
      BertjaxError: it cannot be written.
    """
    try:
        with replacing(path) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {error.strerror or error}") from error


def write_whole(path: Path, content: str | bytes) -> Path:
    """Writes a file, text as UTF-8, whole or not at all, and returns its path.

    Raises:
      BertjaxError: it cannot be written.
    """
    try:
        with replacing(path) as unfinished:
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise BertjaxError(f"cannot write {path}: {error.strerror or error}") from error
    return path
