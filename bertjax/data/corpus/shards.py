"""Encoding of documents to token ids, and shards: files of consecutive encoded documents.

`merge` combines shards into a corpus. A shard PATH has three files for each split:

    PATH.SPLIT.tokens      uint16 or uint32 [tokens]: token ids
    PATH.SPLIT.lengths     uint32 [sentences]: number of tokens of each sentence
    PATH.SPLIT.documents   `DOCUMENT_DTYPE` [documents]: documents with at least one sentence
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from bertjax.data.corpus.documents import Text, split_sentences
from bertjax.data.corpus.store import SPLITS, token_dtype
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.utils.io import AnyPath, as_path, atomic_file

# Fields of a document: number of sentences, number of UTF-8 bytes of the text, and hash of the content.
DOCUMENT_DTYPE = np.dtype([("sentences", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
_LENGTH_DTYPE = np.dtype("<u4")
_ARRAYS = ("tokens", "lengths", "documents")
_BLOCK_ENTRIES = 1 << 20
_BUFFER_BYTES = 1 << 20
# Maximum number of cache entries, summed over the tokenizers of all workers; an entry takes about 250 bytes.
_CACHE_ENTRIES = 1 << 20
_MIN_CACHE_ENTRIES = 1 << 15


@dataclasses.dataclass(frozen=True)
class EncodedDocuments:
    """Encoded documents of one batch and one split.

    Attributes:
      tokens: token ids, uint16 or uint32 [tokens].
      sentence_tokens: number of tokens of each sentence, uint32 [sentences].
      document_sentences: number of sentences of each document, may be 0, uint32 [documents].
      document_bytes: number of UTF-8 bytes of the text of each document, uint64 [documents].
      hashes: hash of the content of each document, uint64 [documents].
    """

    tokens: np.ndarray
    sentence_tokens: np.ndarray
    document_sentences: np.ndarray
    document_bytes: np.ndarray
    hashes: np.ndarray


@dataclasses.dataclass(frozen=True)
class EncodedBatch:
    """One encoded batch of texts.

    Attributes:
      continuation: rest of the previous batch's last document; has no sentences if this batch starts a new document.
      splits: documents that start in this batch, by split.
      last_split: split of the last document; None if no document starts in this batch.
      problems: number of occurrences of each problem.
    """

    continuation: EncodedDocuments
    splits: dict[str, EncodedDocuments]
    last_split: str | None
    problems: Counter[str]


class _Documents:
    """Encoded documents of one split as Python lists, which grow document by document."""

    def __init__(self) -> None:
        self.sentences: list[list[int]] = []
        self.document_sentences: list[int] = []
        self.document_bytes: list[int] = []
        self.hashes: list[int] = []

    def start_document(self, content_hash: int) -> None:
        self.document_sentences.append(0)
        self.document_bytes.append(0)
        self.hashes.append(content_hash)

    def arrays(self, dtype: np.dtype) -> EncodedDocuments:
        lengths = np.fromiter(map(len, self.sentences), np.uint32, len(self.sentences))
        tokens = itertools.chain.from_iterable(self.sentences)
        return EncodedDocuments(
            tokens=np.fromiter(tokens, dtype, int(lengths.sum())),
            sentence_tokens=lengths,
            document_sentences=np.array(self.document_sentences, np.uint32),
            document_bytes=np.array(self.document_bytes, np.uint64),
            hashes=np.array(self.hashes, np.uint64),
        )


class Encoder:
    """Encoder that splits documents into sentences, tokenizes them, and assigns documents to splits."""

    def __init__(self, vocabulary: Vocabulary, heldout_fraction: float, cache_entries: int) -> None:
        self._tokenizer = Tokenizer(vocabulary, cache_entries)
        self._dtype = token_dtype(vocabulary.size)
        self._heldout_below = int(heldout_fraction * 2**64)

    def encode(self, texts: Iterable[Text]) -> EncodedBatch:
        """Encodes one batch.

        A document is held out if the hash of its sentences is below a threshold. A document in several pieces is held
        out if the hash of its first piece is below the threshold.
        """
        problems: Counter[str] = Counter()
        continuation = _Documents()
        continuation.start_document(0)
        splits = {split: _Documents() for split in SPLITS}
        last_split = None
        encode = self._tokenizer.encode
        for text in texts:
            sentences = split_sentences(text.text, text.layout, problems)
            if not text.continues:
                digest = hashlib.blake2b("\n".join(sentences).encode(), digest_size=8).digest()
                content_hash = int.from_bytes(digest)
                last_split = SPLITS[content_hash < self._heldout_below]
                splits[last_split].start_document(content_hash)
            documents = splits[last_split] if last_split else continuation
            ids = [sentence_ids for sentence_ids in map(encode, sentences) if sentence_ids]
            problems["sentences_without_tokens"] += len(sentences) - len(ids)
            documents.sentences += ids
            documents.document_sentences[-1] += len(ids)
            documents.document_bytes[-1] += len(text.text.encode())
        arrays = {split: documents.arrays(self._dtype) for split, documents in splits.items()}
        return EncodedBatch(continuation.arrays(self._dtype), arrays, last_split, problems)


def encode_batch(texts: list[Text], vocabulary: Vocabulary, heldout_fraction: float, workers: int) -> EncodedBatch:
    """Encodes one batch of texts. Not thread-safe.

    `workers` is the number of encoding processes on this machine. The cache of each has 1/`workers` of the total size.
    """
    return _encoder(vocabulary, heldout_fraction, max(_MIN_CACHE_ENTRIES, _CACHE_ENTRIES // workers)).encode(texts)


@functools.lru_cache(maxsize=1)
def _encoder(vocabulary: Vocabulary, heldout_fraction: float, cache_entries: int) -> Encoder:
    # Building a tokenizer is slow, and its cache of encoded words serves all batches of a process.
    return Encoder(vocabulary, heldout_fraction, cache_entries)


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
        """Yields the elements `start` to `stop - 1` of `tokens`, `lengths` or `documents` in blocks."""
        dtype = {"tokens": np.dtype(self.token_dtype), "lengths": _LENGTH_DTYPE, "documents": DOCUMENT_DTYPE}[array]
        with as_path(f"{self.path}.{split}.{array}").open("rb") as file:
            file.seek(start * dtype.itemsize)
            for first in range(start, stop, _BLOCK_ENTRIES):
                entries = min(stop - first, _BLOCK_ENTRIES)
                yield np.frombuffer(file.read(entries * dtype.itemsize), dtype)

    def read_all(self, split: str, array: str) -> np.ndarray:
        """Returns all elements of an array."""
        counted = {"tokens": "tokens", "lengths": "sentences", "documents": "documents"}[array]
        blocks = list(self.read(split, array, 0, self.counts[split][counted]))
        return np.concatenate(blocks) if blocks else np.empty(0, DOCUMENT_DTYPE if array == "documents" else np.uint32)


class _SplitWriter:
    """Writer that appends documents to the files of one split."""

    def __init__(self, files: dict[str, BinaryIO]) -> None:
        self._files = files
        self.counts = dict.fromkeys(("documents", "sentences", "tokens", "text_bytes"), 0)
        self.empty_documents = 0
        # The last document, which the next batch may continue; empty before the first document.
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

    def __init__(self, path: AnyPath, vocabulary_size: int) -> None:
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

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    @property
    def documents(self) -> int:
        """Number of documents written so far."""
        return sum(split.counts["documents"] for split in self._splits.values())

    def add(self, batch: EncodedBatch) -> None:
        """Appends one batch."""
        if batch.continuation.document_bytes.any():
            self._splits[self._last_split].extend(batch.continuation)
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
