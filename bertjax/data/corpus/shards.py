"""Encoding of documents to token ids, and shards: files of consecutive encoded documents.

`merge` combines shards into a corpus and divides the documents into splits. A shard PATH has three files:

    PATH.tokens      uint16 or uint32 [tokens]: token ids
    PATH.sentences   uint32 [sentences]: number of tokens of each sentence
    PATH.documents   `DOCUMENT_DTYPE` [documents]
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from bertjax.data.corpus.documents import Text, split_sentences
from bertjax.data.corpus.store import ARRAYS, token_dtype
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.utils.io import AnyPath, as_path, atomic_file

# Fields of a document: sentence count (may be 0), token count, UTF-8 bytes, and a hash of its sentences. If the
# document was read in several pieces, the hash is that of the first piece.
DOCUMENT_DTYPE = np.dtype([("sentences", "<u8"), ("tokens", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
_BLOCK_DOCUMENTS = 4096
_BLOCK_ENTRIES = 1 << 20
_BUFFER_BYTES = 1 << 20
# Maximum number of cache entries, summed over the tokenizers of all workers; an entry takes about 250 bytes.
_CACHE_ENTRIES = 1 << 20
_MIN_CACHE_ENTRIES = 1 << 15


@dataclasses.dataclass(frozen=True)
class EncodedBatch:
    """One encoded batch of texts.

    Attributes:
      arrays: arrays of a shard; their parts for these texts.
      continues: whether the first document continues the last document of the previous batch.
      problems: number of occurrences of each problem.
    """

    arrays: dict[str, np.ndarray]
    continues: bool
    problems: Counter[str]


def encode_batch(texts: list[Text], vocabulary: Vocabulary, workers: int) -> EncodedBatch:
    """Splits one batch of texts into sentences and tokenizes them. Not thread-safe.

    `workers` is the number of encoding processes on this machine, which share the memory for caches.
    """
    tokenizer = _cached_tokenizer(vocabulary, max(_MIN_CACHE_ENTRIES, _CACHE_ENTRIES // workers))
    problems: Counter[str] = Counter()
    all_ids: list[list[int]] = []
    documents: list[tuple[int, ...]] = []
    for text in texts:
        sentences = split_sentences(text.text, text.layout, problems)
        ids = [sentence_ids for sentence_ids in map(tokenizer.encode, sentences) if sentence_ids]
        problems["sentences_without_tokens"] += len(sentences) - len(ids)
        all_ids += ids
        sizes = len(ids), sum(map(len, ids)), len(text.text.encode())
        if text.continues and documents:
            *previous, content_hash = documents.pop()
            sizes = tuple(map(sum, zip(previous, sizes, strict=True)))
        else:
            digest = hashlib.blake2b("\n".join(sentences).encode(), digest_size=8).digest()
            content_hash = int.from_bytes(digest)
        documents.append((*sizes, content_hash))
    lengths = np.fromiter(map(len, all_ids), np.uint32, len(all_ids))
    tokens = np.fromiter(itertools.chain.from_iterable(all_ids), token_dtype(vocabulary.size), int(lengths.sum()))
    arrays = {"tokens": tokens, "sentences": lengths, "documents": np.array(documents, DOCUMENT_DTYPE)}
    return EncodedBatch(arrays, texts[0].continues, problems)


# Building a tokenizer is slow, and all batches of a process share its cache.
_cached_tokenizer = functools.lru_cache(maxsize=1)(Tokenizer)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A complete shard.

    Attributes:
      path: common prefix of the shard's files, a local path or `gs://` address.
      token_dtype: dtype of the tokens, such as "<u2".
      problems: number of occurrences of each problem.
    """

    path: str
    token_dtype: str
    problems: dict[str, int]

    def documents(self) -> Iterator[np.ndarray]:
        """Yields arrays of consecutive documents, `DOCUMENT_DTYPE` [n], in order."""
        with as_path(f"{self.path}.documents").open("rb") as file:
            while block := file.read(_BLOCK_DOCUMENTS * DOCUMENT_DTYPE.itemsize):
                yield np.frombuffer(block, DOCUMENT_DTYPE)

    def select(self, array: str, heldout_below: int, heldout: bool) -> Iterator[np.ndarray]:
        """Yields the array `tokens` or `sentences` in blocks, for documents of one split only.

        `heldout` selects the held-out split: documents with a hash below `heldout_below`. Blocks may be empty.
        """
        dtype = np.dtype(self.token_dtype if array == "tokens" else np.uint32)
        with as_path(f"{self.path}.{array}").open("rb") as file:
            for documents in self.documents():
                selected = (documents["hash"] < heldout_below) == heldout
                ends = np.cumsum(documents[array], dtype=np.int64)
                for start in range(0, int(ends[-1]), _BLOCK_ENTRIES):
                    stop = min(start + _BLOCK_ENTRIES, int(ends[-1]))
                    block = np.frombuffer(file.read((stop - start) * dtype.itemsize), dtype)
                    # Number of elements of each document in this block.
                    counts = np.diff(np.clip(ends, start, stop), prepend=start)
                    yield block[np.repeat(selected, counts)]


def write_shard(
    path: AnyPath, encoded: Iterable[EncodedBatch], vocabulary: Vocabulary, problems: Counter[str]
) -> Shard:
    """Writes encoded batches, in order, as one shard. `problems` are those that reading the texts counts."""
    # The last document, which the next batch may continue; empty before the first document.
    last = np.empty(0, DOCUMENT_DTYPE)
    with contextlib.ExitStack() as stack:
        files = {}
        for array in ARRAYS:
            file = stack.enter_context(atomic_file(path.parent / f"{path.name}.{array}"))
            files[array] = stack.enter_context(open(file, "wb", _BUFFER_BYTES))
        for batch in encoded:
            problems.update(batch.problems)
            documents = batch.arrays["documents"]
            if batch.continues and last.size:
                for size in ("sentences", "tokens", "bytes"):
                    last[size] += documents[0][size]
                documents = documents[1:]
            documents = np.concatenate([last, documents])
            for array, entries in {**batch.arrays, "documents": documents[:-1]}.items():
                files[array].write(entries.tobytes())
            last = documents[-1:]
        files["documents"].write(last.tobytes())
    return Shard(str(path), token_dtype(vocabulary.size).str, dict(problems))
