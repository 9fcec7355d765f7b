"""Folders of feature shards (.npz files). An interrupted command resumes after the last complete shard."""

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
from bertjax.inference.features import TextsHash, num_texts
from bertjax.utils.io import read_json, remove_temporaries, write_atomic, write_npz

logger = logging.getLogger(__name__)

METADATA = "features.json"


def write_shards(
    folder: Path,
    metadata: dict[str, Any],
    make_shards: Callable[[Iterable[str]], Iterator[dict[str, Any]]],
    texts: Iterable[str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Writes `00000.npz`, `00001.npz`, ... and finally the numbers of texts and shards to `features.json`.

    Keeps existing shards. `texts` must begin with the texts of the existing shards.

    Args:
      folder: output folder, new or from an interrupted command.
      metadata: JSON object of all settings that determine the features, except the texts.
      make_shards: deterministic function from texts to shards.
      texts: texts of all shards.

    Yields:
      The number of texts before each new shard, and the shard.
    """
    with _locked_folder(folder, metadata):
        remaining = iter(texts)
        num_shards, num_done = 0, 0
        while (file := _shard_path(folder, num_shards)).exists():
            num_done += _skip_texts_of(file, remaining)
            num_shards += 1
        if num_shards:
            logger.info(f"resuming {folder} after {num_done:,} texts in {num_shards:,} shards")
        for shard in make_shards(remaining):
            write_npz(_shard_path(folder, num_shards), shard)
            yield num_done, shard
            num_done += num_texts(shard)
            num_shards += 1
        _write_metadata(folder, {**metadata, "texts": num_done, "shards": num_shards})


def _shard_path(folder: Path, index: int) -> Path:
    return folder / f"{index:05}.npz"


def _skip_texts_of(file: Path, texts: Iterator[str]) -> int:
    """Consumes the texts of a shard, checks their hash, and returns their number."""
    try:
        with np.load(file) as shard:
            count, expected_hash = num_texts(shard), str(shard["texts_sha256"])
    except Exception as error:  # zlib, zipfile and NumPy each raise different exception types.
        raise BertjaxError(f"{file} is damaged; remove it and run the same command again") from error
    texts_hash = TextsHash()
    for _ in range(count):
        text = next(texts, None)
        if text is not None:
            texts_hash.add(text)
    if texts_hash.hexdigest() != expected_hash:
        raise UsageError(f"{file} was created from different texts; choose another --output")
    return count


@contextlib.contextmanager
def _locked_folder(folder: Path, metadata: dict[str, Any]) -> Iterator[None]:
    """Creates and locks the folder. Checks the metadata of an existing folder."""
    existed = folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise BertjaxError(f"cannot create the folder {folder}: {error.strerror}; choose another --output") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another command is writing to {folder}; wait, or choose another --output") from None
        remove_temporaries(folder)
        saved = _read_metadata(folder)
        if saved is None:
            if any(folder.iterdir()):
                raise UsageError(f"{folder} contains files other than features; choose another --output")
            _write_metadata(folder, metadata)
        elif changed := [name for name in metadata if saved.get(name) != metadata[name]]:
            raise UsageError(f"{folder} contains features with different {changed[0]}; choose another --output")
        yield
    except UsageError:
        if not existed and [path.name for path in folder.iterdir()] == [METADATA]:
            (folder / METADATA).unlink()
            folder.rmdir()
        raise
    finally:
        os.close(lock)


def _read_metadata(folder: Path) -> dict[str, Any] | None:
    try:
        metadata = read_json(folder / METADATA)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BertjaxError(f"cannot read {folder / METADATA}: {error}; choose another --output") from error
    return metadata if isinstance(metadata, dict) else {}


def _write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    write_atomic(folder / METADATA, json.dumps(metadata, indent=1) + "\n")
