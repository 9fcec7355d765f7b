"""The part of `prepare` that runs in worker processes: batches of text to arrays of ids. Imports little, fast."""

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
from bertjax.data.corpus.tokenizer import Tokenizer, Vocabulary

BATCH_CHARS = 1 << 20
_MAX_BATCH_TEXTS = 8192
# Entries of the word cache, all workers together, about 250 bytes each.
_CACHE_ENTRIES = 1 << 20
_MIN_CACHE_ENTRIES = 1 << 15


@dataclasses.dataclass(frozen=True)
class Part:
    """What one batch adds to one split.

    Attributes:
      tokens: [tokens] uint16 or uint32 ids.
      sentence_tokens: [sentences] uint32, tokens of each sentence.
      document_sentences: [documents] uint32, sentences of each document, 0 included.
      hashes: [documents] uint64, content hash of each document.
      document_bytes: [documents] uint64, UTF-8 bytes of the text of each.
    """

    tokens: np.ndarray
    sentence_tokens: np.ndarray
    document_sentences: np.ndarray
    hashes: np.ndarray
    document_bytes: np.ndarray


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One batch of text, tokenised.

    Attributes:
      head: goes on with the document that the batch before left open; one document, empty where there is none.
      splits: what is new, by split.
      open_split: the split of the batch's last document, None if the whole batch is head.
      problems: what was met, and how often.
    """

    head: Part
    splits: dict[str, Part]
    open_split: str | None
    problems: Counter[str]


class _Gathered:
    def __init__(self) -> None:
        self.tokens: list[list[int]] = []
        self.document_sentences: list[int] = []
        self.document_bytes: list[int] = []
        self.hashes: list[int] = []

    def open(self, digest: int) -> None:
        self.document_sentences.append(0)
        self.document_bytes.append(0)
        self.hashes.append(digest)

    def part(self, dtype: np.dtype) -> Part:
        lengths = np.fromiter(map(len, self.tokens), np.uint32, len(self.tokens))
        flat = itertools.chain.from_iterable(self.tokens)
        return Part(
            np.fromiter(flat, dtype, int(lengths.sum())),
            lengths,
            np.array(self.document_sentences, np.uint32),
            np.array(self.hashes, np.uint64),
            np.array(self.document_bytes, np.uint64),
        )


class Encoder:
    """Splits and tokenises batches, and says which documents are held out. Sent to each worker."""

    def __init__(self, vocabulary: Vocabulary, heldout_share: float, cache_entries: int):
        self._settings = (vocabulary, heldout_share, cache_entries)
        self._tokenizer = Tokenizer(vocabulary, cache_entries)
        self._dtype = token_dtype(vocabulary.size)
        self._heldout_below = int(heldout_share * 2**64)

    def __reduce__(self) -> tuple[type["Encoder"], tuple[Vocabulary, float, int]]:
        return Encoder, self._settings

    def encode(self, texts: Iterable[Text]) -> Encoded:
        """Encodes one batch; a document is held out if the hash of its (first piece's) sentences is small."""
        problems: Counter[str] = Counter()
        head = _Gathered()
        splits = {split: _Gathered() for split in SPLITS}
        open_split = None
        encode = self._tokenizer.encode
        head.open(0)
        for text in texts:
            sentences = split_sentences(text.text, text.form, problems)
            if not text.continues:
                digest = int.from_bytes(hashlib.blake2b("\n".join(sentences).encode(), digest_size=8).digest())
                open_split = SPLITS[digest < self._heldout_below]
                splits[open_split].open(digest)
            gathered = splits[open_split] if open_split else head
            ids = [sentence_ids for sentence_ids in map(encode, sentences) if sentence_ids]
            problems["sentences_without_tokens"] += len(sentences) - len(ids)
            gathered.tokens += ids
            gathered.document_sentences[-1] += len(ids)
            gathered.document_bytes[-1] += len(text.text.encode())
        parts = {split: gathered.part(self._dtype) for split, gathered in splits.items()}
        return Encoded(head.part(self._dtype), parts, open_split, problems)


def batches(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Groups texts to about a megabyte; the grouping depends on the texts alone."""
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
    """Word-cache entries of each of so many workers."""
    return max(_MIN_CACHE_ENTRIES, _CACHE_ENTRIES // workers)


def start_worker(encoder: Encoder) -> None:
    """Makes a worker ready for `encode_batch`."""
    global _encoder
    _encoder = encoder
    # Workers make millions of small lists and no cycles.
    gc.disable()


def encode_batch(texts: list[Text]) -> Encoded:
    """Encodes one batch in a worker started with an encoder."""
    return _encoder.encode(texts)
