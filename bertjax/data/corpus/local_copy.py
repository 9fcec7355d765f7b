"""Download of corpora from object storage to the local disk, once per machine."""

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from etils import epath
from filelock import FileLock

from bertjax.data.corpus.store import MANIFEST, Corpus, open_corpus, read_manifest
from bertjax.errors import BertjaxError
from bertjax.utils.io import CACHE_DIR_VARIABLE, AnyPath, atomic_folder, cache_dir, check_free_space, is_remote
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

# Number of parallel downloads. A single stream does not use the full bandwidth.
_STREAMS = 8
_BLOCK_BYTES = 16 << 20


def open_anywhere(path: str) -> Corpus:
    """Opens a corpus. A corpus at an address such as `gs://bucket/corpus` is first copied to the local disk.

    One process of the machine copies it, and other processes wait. The copy's name includes the hash of the manifest,
    so a different corpus at the same address gets its own copy.
    """
    if not is_remote(path):
        return open_corpus(path)
    source = epath.Path(path)
    files = read_manifest(source)["files"]
    content = (source / MANIFEST).read_bytes()
    folder = cache_dir()
    copy = folder / f"corpus-{hashlib.sha256(content).hexdigest()[:32]}"
    with FileLock(folder / f".{copy.name}.lock"):
        if not copy.exists():
            total_bytes = sum(entry["bytes"] for entry in files.values())
            check_free_space(folder, total_bytes, f"a copy of {path}", f"set {CACHE_DIR_VARIABLE} to another folder")
            logger.info(f"copying {path}, {total_bytes / 1e9:,.2f} GB, to {copy}")
            with (
                atomic_folder(copy, False, "copy", {}) as temporary,
                progress_bar("copy", total_bytes, "B") as bar,
                ThreadPoolExecutor(_STREAMS) as pool,
            ):
                (temporary / MANIFEST).write_bytes(content)
                copies = [
                    pool.submit(_copy_file, source / name, temporary / name, entry["sha256"], bar.update)
                    for name, entry in files.items()
                ]
                for each in copies:
                    each.result()
    return open_corpus(copy)


def _copy_file(source: epath.Path, target: AnyPath, sha256: str, advance: Callable[[int], object]) -> None:
    digest = hashlib.sha256()
    try:
        with source.open("rb") as remote_file, open(target, "wb") as local_file:
            while block := remote_file.read(_BLOCK_BYTES):
                digest.update(block)
                local_file.write(block)
                advance(len(block))
    except FileNotFoundError as error:
        raise BertjaxError(f"{source} is missing; run `bertjax prepare` again") from error
    if digest.hexdigest() != sha256:
        raise BertjaxError(f"{source} does not match its checksum; run `bertjax prepare` again")
