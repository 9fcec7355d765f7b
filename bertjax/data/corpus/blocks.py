"""Large files held against checksums of their blocks: all at once, a part, or all of them little by little.

CRC-32 finds every one or two flipped bits of a block and misses other damage once in 4 billion. Of what Python has it
is the quickest, twice as quick as SHA-256 with hardware help; a corpus has the SHA-256 of whole files besides.
"""

import dataclasses
import hashlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from bertjax.errors import BertjaxError
from bertjax.utils.terminal import progress_bar

BLOCK_BYTES = 1 << 18
CHECKSUM_DTYPE = np.dtype("<u4")
# What is to be read beside training: little beside what a disk or a network gives, a terabyte in an hour and a half.
BACKGROUND_BYTES_PER_SECOND = 200e6
# Files up to this size together are checked whole when they are opened.
WHOLE_BYTES = 64 << 20
_SAMPLED_BLOCKS = 16
_PROGRESS_AFTER_SECONDS = 3


@dataclasses.dataclass(frozen=True)
class Checksums:
    """What a finished file is to be recognised by.

    Attributes:
      sha256: of the whole file.
      blocks: [blocks] uint32, CRC-32 of each block of `BLOCK_BYTES`; the last block may be shorter.
    """

    sha256: str
    blocks: np.ndarray


def checksums_of(path: Path) -> Checksums:
    """Reads a file once."""
    digest, blocks = hashlib.sha256(), []
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            blocks.append(zlib.crc32(block))
    return Checksums(digest.hexdigest(), np.array(blocks, CHECKSUM_DTYPE))


@dataclasses.dataclass(frozen=True, eq=False)
class BlockFile:
    """An array in a file, or in several one after the other, and what each block of it must be.

    Attributes:
      path: of the file; of several, what their array is known by.
      checksums: [blocks] uint32.
      dtype: of the numbers in it.
      of: what it belongs to, such as `the corpus runs/corpus`, for messages.
      remedy: what to do where it is damaged, for messages.
      fault: numbers of a block, with the one before them where there is one, to what is wrong with them although they
        are as written; "" where nothing is.
      shards: the several files; each but the last has the same number of whole blocks.
      shard_blocks: that number.
    """

    path: Path
    checksums: np.ndarray
    dtype: np.dtype
    of: str
    remedy: str
    fault: Callable[[np.ndarray], str] = lambda numbers: ""
    shards: tuple[Path, ...] = ()
    shard_blocks: int = 0

    def place(self, block: int) -> tuple[Path, int]:
        """The file that a block lies in, and which of its blocks it is."""
        if not self.shards:
            return self.path, block
        shard, within = divmod(block, self.shard_blocks)
        return self.shards[shard], within

    def verify(self, read: Callable[[Path, int, int], bytes], block: int) -> None:
        """Reads one block and holds it against what it must be.

        Args:
          read: reads a file, from a byte on, so many bytes or what it has.

        Raises:
          BertjaxError: it is damaged.
          OSError: it cannot be read.
        """
        path, within = self.place(block)
        data = read(path, within * BLOCK_BYTES, BLOCK_BYTES)
        if zlib.crc32(data) != self.checksums[block]:
            raise self._damage(block, "does not match its checksum")
        itemsize = self.dtype.itemsize
        before = b""
        if block:
            path, within = self.place(block - 1)
            before = read(path, (within + 1) * BLOCK_BYTES - itemsize, itemsize)
        whole = len(data) // itemsize * itemsize
        if fault := self.fault(np.frombuffer(before + data[:whole], self.dtype)):
            raise self._damage(block, fault)

    def _damage(self, block: int, what: str) -> BertjaxError:
        path, within = self.place(block)
        start = within * BLOCK_BYTES
        stop = min(start + BLOCK_BYTES, max(start + 1, path.stat().st_size))
        return BertjaxError(
            f"{self.of} is damaged: {path.name}, block {within:,} (bytes {start:,} to {stop - 1:,}) {what}; "
            f"{self.remedy}"
        )


class _Reader:
    """Reads parts of files, of which it holds one open at a time."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file = -1

    def __call__(self, path: Path, start: int, length: int) -> bytes:
        if path != self._path:
            self.close()
            self._file = os.open(path, os.O_RDONLY)
            self._path = path
        return os.pread(self._file, length, start)

    def close(self) -> None:
        if self._path is not None:
            os.close(self._file)
            self._path = None


class Verification:
    """Which blocks of some files have been held against their checksums.

    Blocks are verified by whoever asks for them and, once `start` is called, by a thread that goes through all files in
    their order. Hashing and reading leave Python to other threads.
    """

    def __init__(self, files: Sequence[BlockFile] = ()) -> None:
        self._files: dict[Path, BlockFile] = {}
        self._left: dict[Path, np.ndarray] = {}
        self._damage: BertjaxError | None = None
        self._thread: threading.Thread | None = None
        for file in files:
            self._left[file.path] = np.ones(file.checksums.size, bool)
            self._files[file.path] = file

    def has(self, path: Path) -> bool:
        """Whether a file is one of these."""
        return path in self._files

    def take_over(self, other: "Verification") -> None:
        """Takes in the files of another one, as far as either has verified them."""
        for path, left in other._left.items():
            self._left[path] = left & self._left[path] if path in self._left else left
            self._files[path] = other._files[path]

    def left(self, path: Path) -> int:
        """Blocks of a file that are still to be verified."""
        return int(self._left[path].sum())

    def verify(self, path: Path, blocks: np.ndarray | None = None) -> None:
        """Verifies those of the blocks of a file, or of all, that were not verified before.

        Raises:
          BertjaxError: one is damaged or cannot be read.
        """
        wanted = np.flatnonzero(self._left[path])
        wanted = wanted if blocks is None else np.intersect1d(wanted, blocks)
        what = f"checking {path.name}"
        with progress_bar(what, wanted.size, " blocks", after_seconds=_PROGRESS_AFTER_SECONDS) as bar:
            for _ in self._verified(path, wanted):
                bar.update()

    def verify_at_start(self) -> None:
        """Verifies all blocks of files that are small together, else some of each, the first and the last among them.

        Raises:
          BertjaxError: one is damaged or cannot be read.
        """
        small = sum(file.checksums.size for file in self._files.values()) * BLOCK_BYTES <= WHOLE_BYTES
        for path, file in self._files.items():
            last = file.checksums.size - 1
            sample = np.array([last * i // (_SAMPLED_BLOCKS - 1) for i in range(_SAMPLED_BLOCKS)])
            self.verify(path, None if small else sample)

    def verify_all(self) -> None:
        """Verifies what is left of all files.

        Raises:
          BertjaxError: a block is damaged or cannot be read.
        """
        for path in tuple(self._files):
            self.verify(path)

    def start(self) -> None:
        """Goes on with what is left in a thread, at `BACKGROUND_BYTES_PER_SECOND`; what it finds, `check` tells."""
        if self._thread is None and any(map(self.left, self._files)):
            self._thread = threading.Thread(target=self._work, name="corpus check", daemon=True)
            self._thread.start()

    def check(self) -> None:
        """Raises the BertjaxError of a damaged block, if one has been found."""
        if self._damage is not None:
            raise self._damage

    def _work(self) -> None:
        try:
            # Files may be added meanwhile.
            while paths := [path for path in tuple(self._files) if self.left(path)]:
                due = time.monotonic()
                for _ in self._verified(paths[0], np.flatnonzero(self._left[paths[0]])):
                    due = max(due, time.monotonic() - 1) + BLOCK_BYTES / BACKGROUND_BYTES_PER_SECOND
                    time.sleep(max(0.0, due - time.monotonic()))
        except BertjaxError as error:
            self._damage = error

    def _verified(self, path: Path, blocks: np.ndarray) -> Iterator[int]:
        """Verifies blocks one after the other, skipping those that the other thread was quicker to verify."""
        if blocks.size == 0:
            return
        file, left = self._files[path], self._left[path]
        read = _Reader()
        try:
            for block in blocks.tolist():
                if left[block]:
                    file.verify(read, block)
                    left[block] = False
                yield block
        except OSError as error:
            raise BertjaxError(f"cannot read {file.place(block)[0]}: {error.strerror or error}") from error
        finally:
            read.close()


def blocks_of(starts: np.ndarray, stops: np.ndarray, itemsize: int) -> np.ndarray:
    """Sorted blocks that hold numbers `starts` to `stops - 1` of a file of numbers of `itemsize` bytes.

    Args:
      starts, stops: int64 [spans]; a span of none has no block.
    """
    some = stops > starts
    first, last = starts[some] * itemsize // BLOCK_BYTES, (stops[some] * itemsize - 1) // BLOCK_BYTES
    found = [first]
    # Spans are short: few of them reach over more than one end of a block.
    while first.size:
        first, last = first[first < last] + 1, last[first < last]
        found.append(first)
    return np.unique(np.concatenate(found))
