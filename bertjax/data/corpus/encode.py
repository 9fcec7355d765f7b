"""Encoding of document batches as arrays of token ids, in worker processes."""

import dataclasses
import gc
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from bertjax.data.corpus.layouts import Text
from bertjax.data.corpus.sentences import split_sentences
from bertjax.data.corpus.store import SPLITS, token_dtype
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary

BATCH_CHARS = 1 << 20
_MAX_BATCH_TEXTS = 8192
# Total cache entries of all workers' tokenizers; an entry takes about 250 bytes.
_CACHE_ENTRIES = 1 << 20
_MIN_CACHE_ENTRIES = 1 << 15


@dataclasses.dataclass(frozen=True)
class EncodedDocuments:
    """Documents of one batch and one split.

    Attributes:
      tokens: [tokens] uint16 or uint32 token ids.
      sentence_tokens: [sentences] uint32, number of tokens of each sentence.
      document_sentences: [documents] uint32, number of sentences of each document; may be 0.
      document_bytes: [documents] uint64, UTF-8 bytes of the text of each document.
      hashes: [documents] uint64, hash of the content of each document.
    """

    tokens: np.ndarray
    sentence_tokens: np.ndarray
    document_sentences: np.ndarray
    document_bytes: np.ndarray
    hashes: np.ndarray


@dataclasses.dataclass(frozen=True)
class EncodedBatch:
    """One tokenized batch.

    Attributes:
      head: continuation of the previous batch's last document. It has no sentences if this batch starts with a new
        document.
      splits: documents that start in this batch, by split.
      last_split: split of the last document; None if no document starts in this batch.
      problems: number of occurrences of each problem.
    """

    head: EncodedDocuments
    splits: dict[str, EncodedDocuments]
    last_split: str | None
    problems: Counter[str]


class _Documents:
    """Lists of documents, collected one by one."""

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
    """Picklable encoder that splits documents into sentences, tokenizes them, and assigns documents to splits."""

    def __init__(self, vocabulary: Vocabulary, heldout_fraction: float, cache_entries: int):
        self._arguments = (vocabulary, heldout_fraction, cache_entries)
        self._tokenizer = Tokenizer(vocabulary, cache_entries)
        self._dtype = token_dtype(vocabulary.size)
        self._heldout_below = int(heldout_fraction * 2**64)

    def __reduce__(self) -> tuple[type["Encoder"], tuple[Vocabulary, float, int]]:
        return Encoder, self._arguments

    def encode(self, texts: Iterable[Text]) -> EncodedBatch:
        """Encodes one batch.

        A document is held out if the hash of its sentences is below a threshold. For a document in several pieces, the
        hash of the first piece decides.
        """
        problems: Counter[str] = Counter()
        head = _Documents()
        head.start_document(0)
        splits = {split: _Documents() for split in SPLITS}
        last_split = None
        encode = self._tokenizer.encode
        for text in texts:
            sentences = split_sentences(text.text, text.form, problems)
            if not text.continues:
                digest = hashlib.blake2b("\n".join(sentences).encode(), digest_size=8).digest()
                content_hash = int.from_bytes(digest)
                last_split = SPLITS[content_hash < self._heldout_below]
                splits[last_split].start_document(content_hash)
            documents = splits[last_split] if last_split else head
            ids = [sentence_ids for sentence_ids in map(encode, sentences) if sentence_ids]
            problems["sentences_without_tokens"] += len(sentences) - len(ids)
            documents.sentences += ids
            documents.document_sentences[-1] += len(ids)
            documents.document_bytes[-1] += len(text.text.encode())
        arrays = {split: documents.arrays(self._dtype) for split, documents in splits.items()}
        return EncodedBatch(head.arrays(self._dtype), arrays, last_split, problems)


def batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Groups texts into batches of about a million characters."""
    batch: list[Text] = []
    chars = 0
    for text in texts:
        batch.append(text)
        chars += len(text.text)
        if chars >= BATCH_CHARS or len(batch) >= _MAX_BATCH_TEXTS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def cache_entries(workers: int) -> int:
    """Returns the cache size of each worker's tokenizer."""
    return max(_MIN_CACHE_ENTRIES, _CACHE_ENTRIES // workers)


def start_worker(encoder: Encoder) -> None:
    """Initializes a worker process for `encode_batch`."""
    global _encoder
    _encoder = encoder
    # Garbage collection is useless and slow here: workers create millions of small lists but no reference cycles.
    gc.disable()


def encode_batch(texts: list[Text]) -> EncodedBatch:
    """Encodes one batch in a process initialized by `start_worker`."""
    return _encoder.encode(texts)
