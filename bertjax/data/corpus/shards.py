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
# document was read in several pieces, the hash covers the first piece only.
DOCUMENT_DTYPE = np.dtype([("sentences", "<u8"), ("tokens", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
_BLOCK_DOCUMENTS = 4096
_BLOCK_ENTRIES = 1 << 20
_BUFFER_BYTES = 1 << 20
# Maximum number of cache entries, summed over the tokenizers of all workers; an entry takes about 250 bytes.
_CACHE_ENTRIES = 1 << 20
_MIN_CACHE_ENTRIES = 1 << 15


# Building a tokenizer is slow, and all chunks of a process share its cache.
_cached_tokenizer = functools.lru_cache(maxsize=1)(Tokenizer)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A complete shard.

    Attributes:
      path: path of its files without the suffixes `.tokens`, `.sentences` and `.documents`.
      token_dtype: dtype of the tokens, such as "<u2".
      problems: counts of problems in the text, by kind.
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
    path: AnyPath, texts: Iterable[Text], vocabulary: Vocabulary, problems: Counter[str], workers: int
) -> Shard:
    """Splits texts into sentences, tokenizes them, and writes them as one shard. Not thread-safe.

    `problems` is the counter that reading `texts` updates. `workers` is the number of encoding processes on this
    machine, which share the memory for caches.
    """
    tokenizer = _cached_tokenizer(vocabulary, max(_MIN_CACHE_ENTRIES, _CACHE_ENTRIES // workers))
    dtype = token_dtype(vocabulary.size)
    # The last document, which the next text may continue: `DOCUMENT_DTYPE` [1], or empty before the first document.
    last = np.empty(0, DOCUMENT_DTYPE)
    with contextlib.ExitStack() as stack:
        files = {}
        for array in ARRAYS:
            file = stack.enter_context(atomic_file(path.parent / f"{path.name}.{array}"))
            files[array] = stack.enter_context(open(file, "wb", _BUFFER_BYTES))
        for text in texts:
            sentences = split_sentences(text.text, text.layout, problems)
            ids = [sentence_ids for sentence_ids in tokenizer.encode_all(sentences) if sentence_ids]
            problems["sentences_without_tokens"] += len(sentences) - len(ids)
            lengths = np.fromiter(map(len, ids), np.uint32, len(ids))
            tokens = np.fromiter(itertools.chain.from_iterable(ids), dtype, int(lengths.sum()))
            files["sentences"].write(lengths.tobytes())
            files["tokens"].write(tokens.tobytes())
            sizes = {"sentences": len(ids), "tokens": tokens.size, "bytes": len(text.text.encode())}
            if not (text.continues and last.size):
                files["documents"].write(last.tobytes())
                digest = hashlib.blake2b("\n".join(sentences).encode(), digest_size=8).digest()
                last = np.array([(0, 0, 0, int.from_bytes(digest))], DOCUMENT_DTYPE)
            for name, size in sizes.items():
                last[name] += size
        files["documents"].write(last.tobytes())
    return Shard(str(path), dtype.str, dict(problems))
