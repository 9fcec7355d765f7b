"""A folder of features in shards: each there whole or not at all, so that a killed command goes on after the last."""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.errors import BertjaxError, UsageError
from bertjax.inference.features import TextsHash, texts_in
from bertjax.utils.io import read_json, remove_temporaries, write_atomic, write_npz

logger = logging.getLogger(__name__)

ABOUT = "features.json"
_TOTALS = ("texts", "shards")


def write_shards(
    folder: Path,
    about: dict[str, Any],
    shards_of: Callable[[Iterable[str]], Iterator[dict[str, Any]]],
    texts: Iterable[str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Writes `00000.npz`, `00001.npz`, ... and, at the end, how many texts and shards there are in `features.json`.

    Shards that are there are not made again; the texts they are of must be those given now.

    Args:
      about: what decides the features beside the texts, in a form that JSON has.
      shards_of: texts to shards, the same for the same texts.

    Yields:
      Each shard that was made, and the number of texts in those before it.

    Raises:
      UsageError: the folder is another's, or of other features or texts.
      BertjaxError: it cannot be written, or a shard in it is damaged.
    """
    with _claimed(folder, about):
        remaining = iter(texts)
        number, count = 0, 0
        while (file := _shard(folder, number)).exists():
            count += _passed_over(file, remaining)
            number += 1
        if number:
            logger.info(f"{folder} has {count:,} texts in {number:,} shards; going on after them")
        for shard in shards_of(remaining):
            write_npz(_shard(folder, number), shard)
            yield count, shard
            count += texts_in(shard)
            number += 1
        _write_about(folder, {**about, **dict(zip(_TOTALS, (count, number), strict=True))})


def _shard(folder: Path, number: int) -> Path:
    return folder / f"{number:05}.npz"


def _passed_over(file: Path, texts: Iterator[str]) -> int:
    """How many texts a shard has, which are taken from `texts`."""
    try:
        with np.load(file) as shard:
            count, expected = texts_in(shard), str(shard["texts_sha256"])
    except Exception as error:  # A damaged archive is an exception of zlib, zipfile or NumPy.
        raise BertjaxError(f"{file} is damaged; remove it, and the same command makes it again") from error
    digest = TextsHash()
    for _ in range(count):
        text = next(texts, None)
        if text is not None:
            digest.add(text)
    if digest.hexdigest() != expected:
        raise UsageError(f"{file} is of other texts than those given now; choose another --output")
    return count


@contextlib.contextmanager
def _claimed(folder: Path, about: dict[str, Any]) -> Iterator[None]:
    """Makes the folder, or takes one that was made for the same, for this process alone."""
    there = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BertjaxError(f"cannot make the folder {folder} ({error.strerror}); choose another --output") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"another command is writing to {folder}; wait for it or choose another --output"
            ) from None
        # Of a command that was killed: no other has the lock.
        remove_temporaries(folder)
        found = _read_about(folder)
        if found is None and any(folder.iterdir()):
            raise UsageError(f"{folder} has files in it that are no features; choose another --output")
        changed = [name for name in about if found is not None and found.get(name) != about[name]]
        if changed:
            raise UsageError(f"{folder} has features with another {changed[0]}; choose another --output")
        if found is None:
            _write_about(folder, about)
        yield
    except UsageError:
        if not there and [path.name for path in folder.iterdir()] == [ABOUT]:
            # Nothing came of it.
            (folder / ABOUT).unlink()
            folder.rmdir()
        raise
    finally:
        os.close(handle)


def _read_about(folder: Path) -> dict[str, Any] | None:
    try:
        found = read_json(folder / ABOUT)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BertjaxError(f"cannot read {folder / ABOUT} ({error}); choose another --output") from error
    return found if isinstance(found, dict) else {}


def _write_about(folder: Path, about: dict[str, Any]) -> None:
    write_atomic(folder / ABOUT, json.dumps(about, indent=1) + "\n")
