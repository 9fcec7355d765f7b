"""Format of a tokenized corpus on disk, and functions that read and write it.

A corpus folder contains:

    manifest.json              counts, settings, and size and SHA-256 of each other file
    vocab.txt | spiece.model | tokenizer.json   vocabulary file
    SPLIT.tokens.bin           little-endian uint16 (uint32 for vocabularies over 65,536): all token ids in order
    SPLIT.sentences.bin        uint64 [sentences + 1]: index of each sentence's first token. The last element is the
                               number of tokens of the split.
    SPLIT.documents.bin        uint64 [documents + 1]: index of each document's first sentence. The last element is the
                               number of sentences of the split.

SPLIT is `train` or `heldout`. The arrays are memory-mapped, so a corpus may be larger than RAM, and any sentence is
found in constant time.
"""

import dataclasses
import hashlib
import json
import logging
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from filelock import FileLock

from bertjax.data.corpus.vocabulary import Vocabulary, load_entry
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.utils.io import (
    CACHE_DIR_VARIABLE,
    AnyPath,
    atomic_folder,
    cache_dir,
    check_free_space,
    file_sha256,
    is_remote,
    read_json_object,
)
from bertjax.utils.terminal import progress_bar

logger = logging.getLogger(__name__)

FORMAT = 3
MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")
ARRAYS = ("tokens", "sentences", "documents")
OFFSET_DTYPE = np.dtype("<u8")

_PREPARE_AGAIN = "run `bertjax prepare` again"
_SECONDS_BEFORE_LOG = 3
# Number of parallel downloads, because a single stream does not use the full bandwidth.
_STREAMS = 8
_BLOCK_BYTES = 16 << 20
# Python before 3.13 does not define this constant, so give its value on Linux.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclasses.dataclass(frozen=True)
class Split:
    """Memory-mapped arrays of one split, as described in the docstring of this module."""

    tokens: np.ndarray  # uint16 or uint32 [tokens]: token ids
    sentences: np.ndarray  # uint64 [sentences + 1]: index of each sentence's first token
    documents: np.ndarray  # uint64 [documents + 1]: index of each document's first sentence

    @property
    def num_documents(self) -> int:
        return self.documents.size - 1


class Checksums:
    """Verifier of SHA-256 checksums in a background thread, which reads each file once and rarely holds the GIL."""

    def __init__(self) -> None:
        self._paths: set[Path] = set()
        self._pending: deque[tuple[Path, str, str]] = deque()
        self._error: BertjaxError | None = None
        self._thread: threading.Thread | None = None

    def add(self, path: Path, sha256: str, remedy: str) -> None:
        """Adds a file to verify, unless it was added before. `remedy` is advice for the error message."""
        if path not in self._paths:
            self._paths.add(path)
            self._pending.append((path, sha256, remedy))

    def verify_in_background(self) -> None:
        """Starts a thread that verifies the files added so far, unless such a thread is already running."""
        if self._pending and not (self._thread and self._thread.is_alive()):
            # Use a daemon thread, so that an interrupted command exits without waiting for it.
            self._thread = threading.Thread(target=self._verify, name="checksums", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises a BertjaxError if the background thread has found a damaged or unreadable file."""
        if self._error:
            raise self._error

    def wait(self) -> None:
        """Verifies all remaining files. Raises the same error as `check`."""
        if self._thread:
            self._thread.join(_SECONDS_BEFORE_LOG)
            if self._thread.is_alive():
                logger.info("verifying the checksums of the data")
                self._thread.join()
        self._verify()
        self.check()

    def _verify(self) -> None:
        while self._pending and not self._error:
            path, sha256, remedy = self._pending.popleft()
            try:
                if file_sha256(path) != sha256:
                    self._error = BertjaxError(f"{path} is damaged: its SHA-256 differs from the stored one; {remedy}")
            except OSError as error:
                self._error = BertjaxError(f"cannot read {path}: {first_line(error)}; check the disk")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """An opened corpus in a local folder.

    `checksums` covers the arrays and derived files such as the pair index (`pretraining.pair_index`).
    """

    path: Path
    manifest: dict[str, Any]
    train: Split
    heldout: Split
    checksums: Checksums

    def vocabulary(self) -> Vocabulary:
        """Loads the vocabulary."""
        return load_entry(self.path, self.manifest["vocabulary"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the manifest. It identifies the corpus, since the manifest contains the SHA-256 of every file."""
        return hashlib.sha256((self.path / MANIFEST).read_bytes()).hexdigest()


def array_file(split: str, array: str) -> str:
    """Returns the file name of one array of one split."""
    return f"{split}.{array}.bin"


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Returns the smallest dtype that can represent every token id."""
    return np.dtype("<u2") if vocabulary_size <= 1 << 16 else np.dtype("<u4")


def write_manifest(folder: AnyPath, manifest: dict[str, Any]) -> None:
    """Writes the manifest with sorted keys, so that equal corpora have byte-identical manifests."""
    text = json.dumps({"format": FORMAT, **manifest}, indent=1, sort_keys=True, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(path: AnyPath) -> dict[str, Any]:
    """Reads and checks the manifest of a corpus."""
    file = path / MANIFEST
    if not file.is_file():
        raise UsageError(f"no corpus at {path}: {MANIFEST} is missing; make one with `bertjax prepare`")
    try:
        manifest = read_json_object(file)
        if (version := manifest["format"]) != FORMAT:
            raise UsageError(f"the corpus {path} has format {version}, not {FORMAT}; {_PREPARE_AGAIN}")
        vocabulary = manifest["vocabulary"]
        names = {vocabulary["file"], *(array_file(split, array) for split in SPLITS for array in ARRAYS)}
        # Reject slashes, because the vocabulary file must be in the corpus folder.
        is_valid = {*manifest["files"]} == names and "/" not in vocabulary["file"]
        if not is_valid or manifest["token_dtype"] != token_dtype(vocabulary["size"]).str:
            raise ValueError("its entries are inconsistent")
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the corpus manifest {file} is damaged: {error}; {_PREPARE_AGAIN}") from error
    return manifest


def open_corpus(path: str | Path) -> Corpus:
    """Opens a corpus. A corpus at a `gs://` path is first copied to the local disk.

    Checks file sizes and the vocabulary's checksum; `Corpus.checksums` verifies the arrays.
    """
    path = _local_copy(str(path)) if is_remote(path) else Path(path)
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise UsageError(f"{file} is missing or does not have {entry['bytes']:,} bytes; {_PREPARE_AGAIN}")
    checksums = Checksums()
    vocabulary = manifest["vocabulary"]["file"]
    checksums.add(path / vocabulary, manifest["files"][vocabulary]["sha256"], _PREPARE_AGAIN)
    checksums.wait()
    dtypes = {"tokens": np.dtype(manifest["token_dtype"]), "sentences": OFFSET_DTYPE, "documents": OFFSET_DTYPE}
    splits = {}
    # Verify the held-out split first, because it is small and the first evaluation reads all of it.
    for split in reversed(SPLITS):
        files = {array: array_file(split, array) for array in ARRAYS}
        for file in files.values():
            checksums.add(path / file, manifest["files"][file]["sha256"], _PREPARE_AGAIN)
        splits[split] = Split(**{array: map_array(path / file, dtypes[array]) for array, file in files.items()})
    return Corpus(path, manifest, **splits, checksums=checksums)


def _local_copy(address: str) -> Path:
    """Copies a corpus to the cache folder if necessary, and returns the path of the copy.

    One process per machine copies, and others wait. The copy is named by the manifest's hash, so that a different
    corpus at the same path gets its own copy.
    """
    source = epath.Path(address)
    files = read_manifest(source)["files"]
    content = (source / MANIFEST).read_bytes()
    folder = cache_dir()
    copy = folder / f"corpus-{hashlib.sha256(content).hexdigest()[:32]}"
    with FileLock(folder / f".{copy.name}.lock"):
        if not copy.exists():
            total_bytes = sum(entry["bytes"] for entry in files.values())
            check_free_space(folder, total_bytes, f"a copy of {address}", f"set {CACHE_DIR_VARIABLE} to another folder")
            logger.info(f"copying {address}, {total_bytes / 1e9:,.2f} GB, to {copy}")
            with (
                atomic_folder(copy, False, "copy", {}) as temporary,
                progress_bar("copy", total_bytes, "B") as bar,
                ThreadPoolExecutor(_STREAMS) as pool,
            ):
                (temporary / MANIFEST).write_bytes(content)
                list(
                    pool.map(
                        lambda name: _copy_file(source / name, temporary, files[name]["sha256"], bar.update), files
                    )
                )
    return copy


def _copy_file(source: epath.Path, folder: AnyPath, sha256: str, advance: Callable[[int], object]) -> None:
    digest = hashlib.sha256()
    try:
        with source.open("rb") as remote_file, open(folder / source.name, "wb") as local_file:
            while block := remote_file.read(_BLOCK_BYTES):
                digest.update(block)
                local_file.write(block)
                advance(len(block))
    except FileNotFoundError as error:
        raise BertjaxError(f"{source} is missing; {_PREPARE_AGAIN}") from error
    if digest.hexdigest() != sha256:
        raise BertjaxError(f"{source} does not match its checksum; {_PREPARE_AGAIN}")


def map_array(path: Path, dtype: np.dtype) -> np.ndarray:
    """Memory-maps a file of raw numbers, copy-on-write.

    TensorFlow shares the memory of an array only if the array is writable. The copy-on-write mode of `np.memmap` is
    writable, but reserves space for copies of all pages. Linux therefore rejects it for files larger than memory and
    swap. `mmap` with MAP_NORESERVE does not reserve space.
    """
    size = path.stat().st_size
    if size == 0:
        return np.zeros(0, dtype)
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
    # Disable readahead for files larger than half of memory, because it would fetch megabytes per row.
    if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2:
        mapping.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapping, dtype)
