"""Download of corpora from object storage to the local disk, once per machine."""

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath
from filelock import FileLock

from bertjax.data.corpus.store import MANIFEST, Corpus, open_corpus, read_manifest
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.io import CACHE_DIR_VARIABLE, AnyPath, atomic_folder, cache_dir, check_free_space, is_remote
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

# Number of parallel downloads. A single stream does not use the full bandwidth.
_STREAMS = 8
_BLOCK_BYTES = 16 << 20


def open_anywhere(path: str) -> Corpus:
    """Opens a corpus. A corpus at an address such as `gs://bucket/corpus` is first copied to the local disk."""
    return open_corpus(_local_copy(path) if is_remote(path) else path)


def _local_copy(address: str) -> Path:
    """Returns the path of the local copy of a corpus. One process of the machine copies it, and other processes wait.

    The copy's name includes the hash of the manifest, so a different corpus at the same address gets its own copy.
    """
    source = epath.Path(address)
    manifest = read_manifest(source)
    sha256 = hashlib.sha256((source / MANIFEST).read_bytes()).hexdigest()
    folder = cache_dir()
    copy = folder / f"corpus-{sha256[:32]}"
    with FileLock(folder / f".{copy.name}.lock"):
        if not copy.exists():
            total_bytes = sum(entry["bytes"] for entry in manifest["files"].values())
            check_free_space(folder, total_bytes, f"a copy of {address}", f"set {CACHE_DIR_VARIABLE} to another folder")
            logger.info(f"copying {address}, {total_bytes / 1e9:,.2f} GB, to {copy}")
            with atomic_folder(copy, False, "copy", {}) as temporary:
                _copy_files(source, manifest["files"], temporary, total_bytes)
                content = (source / MANIFEST).read_bytes()
                if hashlib.sha256(content).hexdigest() != sha256:
                    raise BertjaxError(
                        f"{source / MANIFEST} changed while the corpus was copied; run the same command again"
                    )
                (temporary / MANIFEST).write_bytes(content)
    return copy


def _copy_files(source: epath.Path, files: dict[str, dict[str, Any]], folder: AnyPath, total_bytes: int) -> None:
    with progress_bar("copy", total_bytes, "B") as bar, ThreadPoolExecutor(_STREAMS) as pool:

        def copy(name: str) -> None:
            _copy_file(source / name, folder / name, files[name]["sha256"], bar.update)

        for _ in pool.map(copy, files):
            pass


def _copy_file(source: epath.Path, target: AnyPath, sha256: str, advance: Callable[[int], object]) -> None:
    digest = hashlib.sha256()
    try:
        with source.open("rb") as remote_file, open(target, "wb") as local_file:
            while block := remote_file.read(_BLOCK_BYTES):
                digest.update(block)
                local_file.write(block)
                advance(len(block))
    except FileNotFoundError as error:
        raise UsageError(
            f"the corpus {source.parent} is damaged: {source.name} is missing; run `bertjax prepare` again"
        ) from error
    if digest.hexdigest() != sha256:
        raise BertjaxError(
            f"the corpus {source.parent} is damaged: {source.name} does not match its checksum; "
            "run `bertjax prepare` again"
        )
