"""A corpus on object storage, copied once a machine to its disk, from where it is mapped into memory."""

import hashlib
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath
from filelock import FileLock

from bertjax.data.corpus.store import MANIFEST, Corpus, open_corpus, read_manifest
from bertjax.errors import BertjaxError, UsageError
from bertjax.utils.atomic_directory import atomic_directory
from bertjax.utils.io import CACHE_DIR_VARIABLE, cache_dir, check_free_space, is_remote
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

# Storage gives one stream less than a network has.
_STREAMS = 8
_BLOCK_BYTES = 16 << 20


def open_anywhere(path: str) -> Corpus:
    """Opens a corpus on this machine's disk, or at an address, of which a copy is made first where there is none.

    Raises:
      UsageError: there is no corpus.
      BertjaxError: it is damaged, the disk is too small for a copy, or storage fails.
    """
    return open_corpus(local_copy(path) if is_remote(path) else path)


def local_copy(address: str) -> Path:
    """Where the copy of a corpus lies on this machine.

    Its name comes of the hash of its manifest, so that another corpus at the same address is another copy. Of several
    processes of a machine one copies, and the others wait; each file is held against the manifest as it arrives.

    Raises:
      UsageError: there is no corpus at the address.
      BertjaxError: the disk is too small, or a file arrives damaged.
    """
    source = epath.Path(address)
    manifest = read_manifest(source)
    sha256 = hashlib.sha256((source / MANIFEST).read_bytes()).hexdigest()
    folder = cache_dir()
    copy = folder / f"corpus-{sha256[:32]}"
    with FileLock(folder / f".{copy.name}.lock"):
        if not copy.exists():
            size = sum(entry["bytes"] for entry in manifest["files"].values())
            check_free_space(folder, size, f"a copy of {address}", f"name another folder in {CACHE_DIR_VARIABLE}")
            logger.info(f"copying {address}, {size / 1e9:,.2f} GB, to {copy}")
            with atomic_directory(copy, False, "copy", lambda path: False) as new:
                _copy(source, manifest, new, size)
                (new / MANIFEST).write_bytes(_arrived(source / MANIFEST, sha256))
    return copy


def _copy(source: epath.Path, manifest: dict[str, Any], folder: Path, size: int) -> None:
    with (
        progress_bar("copy", size, "B") as bar,
        ThreadPoolExecutor(_STREAMS) as pool,
    ):
        copies = [
            pool.submit(_copy_file, source / name, folder / name, entry["sha256"], bar.update)
            for name, entry in manifest["files"].items()
        ]
        try:
            for copy in copies:
                copy.result()
        finally:
            for copy in copies:
                copy.cancel()


def _copy_file(source: epath.Path, target: Path, sha256: str, done: Any) -> None:
    found = hashlib.sha256()
    try:
        with source.open("rb") as file, open(target, "wb") as copied:
            while block := file.read(_BLOCK_BYTES):
                found.update(block)
                copied.write(block)
                done(len(block))
    except FileNotFoundError as error:
        raise UsageError(f"the corpus {source.parent} is damaged: {source.name} is missing") from error
    if found.hexdigest() != sha256:
        raise BertjaxError(f"the corpus {source.parent} is damaged: {source.name} does not match its checksum")


def _arrived(file: epath.Path, sha256: str) -> bytes:
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise BertjaxError(f"{file} has changed while the corpus was copied; run again")
    return content
