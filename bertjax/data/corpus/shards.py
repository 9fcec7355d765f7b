"""Shards: files of consecutive tokenized documents, which `merge` combines into a corpus.

A shard PATH has three files for each split:

    PATH.SPLIT.tokens      uint16 or uint32 [tokens]: token ids
    PATH.SPLIT.lengths     uint32 [sentences]: number of tokens of each sentence
    PATH.SPLIT.documents   `DOCUMENT_DTYPE` [documents]: documents with at least one sentence
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from etils import epath

from bertjax.data.corpus.encode import EncodedBatch, EncodedDocuments
from bertjax.data.corpus.store import SPLITS, token_dtype
from bertjax.utils.io import as_path, atomic_file

# Entry of a document: number of sentences, number of UTF-8 bytes of the text, and hash of the content.
DOCUMENT_DTYPE = np.dtype([("sentences", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
_LENGTH_DTYPE = np.dtype("<u4")
_ARRAYS = ("tokens", "lengths", "documents")
_BLOCK_ENTRIES = 1 << 20
_BUFFER_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Shard:
    """A complete shard.

    Attributes:
      path: common prefix of the shard's files, a local path or `gs://` address.
      token_dtype: dtype of the tokens, such as "<u2".
      counts: number of `documents`, `sentences`, `tokens` and `text_bytes` of each split.
      problems: number of occurrences of each problem.
    """

    path: str
    token_dtype: str
    counts: dict[str, dict[str, int]]
    problems: dict[str, int]

    def read(self, split: str, array: str, start: int, stop: int) -> Iterator[np.ndarray]:
        """Yields entries `start` to `stop - 1` of an array in blocks."""
        dtype = {"tokens": np.dtype(self.token_dtype), "lengths": _LENGTH_DTYPE, "documents": DOCUMENT_DTYPE}[array]
        with as_path(f"{self.path}.{split}.{array}").open("rb") as file:
            file.seek(start * dtype.itemsize)
            for first in range(start, stop, _BLOCK_ENTRIES):
                entries = min(stop - first, _BLOCK_ENTRIES)
                yield np.frombuffer(file.read(entries * dtype.itemsize), dtype)

    def read_all(self, split: str, array: str) -> np.ndarray:
        """Returns an entire array."""
        counted = {"tokens": "tokens", "lengths": "sentences", "documents": "documents"}[array]
        blocks = list(self.read(split, array, 0, self.counts[split][counted]))
        return np.concatenate(blocks) if blocks else np.empty(0, DOCUMENT_DTYPE if array == "documents" else np.uint32)


class _SplitWriter:
    """Writer that appends documents to the files of one split."""

    def __init__(self, files: dict[str, BinaryIO]):
        self._files = files
        self.counts = dict.fromkeys(("documents", "sentences", "tokens", "text_bytes"), 0)
        self.empty_documents = 0
        # Entry of the last document, which the next batch may extend; empty before the first document.
        self._last_document = np.empty(0, DOCUMENT_DTYPE)

    def add(self, documents: EncodedDocuments) -> None:
        """Appends documents."""
        self._add_sentences(documents)
        entries = np.empty(documents.hashes.size, DOCUMENT_DTYPE)
        entries["sentences"], entries["bytes"] = documents.document_sentences, documents.document_bytes
        entries["hash"] = documents.hashes
        entries = np.concatenate([self._last_document, entries])
        self._add_documents(entries[:-1])
        self._last_document = entries[-1:]

    def extend(self, documents: EncodedDocuments) -> None:
        """Appends sentences to the last document."""
        self._add_sentences(documents)
        self._last_document["sentences"] += documents.document_sentences.sum(dtype=np.uint64)
        self._last_document["bytes"] += documents.document_bytes.sum(dtype=np.uint64)

    def finish(self) -> None:
        """Writes the last document."""
        self._add_documents(self._last_document)

    def _add_sentences(self, documents: EncodedDocuments) -> None:
        self._write("tokens", documents.tokens)
        self._write("lengths", documents.sentence_tokens.astype(_LENGTH_DTYPE))
        self.counts["tokens"] += documents.tokens.size
        self.counts["sentences"] += documents.sentence_tokens.size

    def _add_documents(self, entries: np.ndarray) -> None:
        written = entries[entries["sentences"] > 0]
        self._write("documents", written)
        self.counts["documents"] += written.size
        self.counts["text_bytes"] += int(entries["bytes"].sum())
        self.empty_documents += entries.size - written.size

    def _write(self, array: str, entries: np.ndarray) -> None:
        self._files[array].write(entries.tobytes())


class ShardWriter:
    """Context manager that writes encoded batches, in order, as one shard.

    The files appear under their final names when the context ends without an error.
    """

    def __init__(self, path: Path | epath.Path, vocabulary_size: int):
        self._path = path
        self._token_dtype = token_dtype(vocabulary_size)
        self._stack = contextlib.ExitStack()
        self._splits: dict[str, _SplitWriter] = {}
        self._last_split = SPLITS[0]

    def __enter__(self) -> "ShardWriter":
        with contextlib.ExitStack() as stack:
            for split in SPLITS:
                files = {}
                for array in _ARRAYS:
                    path = stack.enter_context(atomic_file(self._path.parent / f"{self._path.name}.{split}.{array}"))
                    files[array] = stack.enter_context(open(path, "wb", _BUFFER_BYTES))
                self._splits[split] = _SplitWriter(files)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    @property
    def documents(self) -> int:
        """Number of documents written so far."""
        return sum(split.counts["documents"] for split in self._splits.values())

    def add(self, batch: EncodedBatch) -> None:
        """Appends one batch."""
        if batch.head.document_bytes.any():
            self._splits[self._last_split].extend(batch.head)
        if batch.last_split:
            for split, documents in batch.splits.items():
                self._splits[split].add(documents)
            self._last_split = batch.last_split

    def finish(self, problems: Counter[str]) -> Shard:
        """Writes the last documents, adds the number of empty documents to `problems`, and returns the shard."""
        for split in self._splits.values():
            split.finish()
            problems["documents_without_sentences"] += split.empty_documents
        counts = {name: split.counts for name, split in self._splits.items()}
        return Shard(str(self._path), self._token_dtype.str, counts, dict(problems))
