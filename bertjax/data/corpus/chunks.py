"""Steps that create a corpus, for the runners in `prepare.py` and `run_beam.py`.

The steps divide the inputs into chunks of whole documents, encode each chunk to a shard, and merge the shards to the
arrays of the corpus, in text order and with bounded memory. A step may run several times, even concurrently, because
its files have names and contents that depend only on its input. Encoding writes a small JSON file last, and is skipped
if this file exists. A shard PATH has three files:

    PATH.tokens      uint16 or uint32 [tokens]: token ids
    PATH.sentences   uint32 [sentences]: number of tokens of each sentence
    PATH.documents   `DOCUMENT_DTYPE` [documents]
"""

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bertjax.data.corpus import readers
from bertjax.data.corpus.documents import Text, grouped, with_spaces
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.sentences import split_sentences
from bertjax.data.corpus.store import ARRAYS, OFFSET_DTYPE, SPLITS, array_file, token_dtype
from bertjax.data.corpus.tokenizer import Tokenizer
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.errors import BertjaxError
from bertjax.utils.io import AnyPath, as_path, atomic_file, read_json
from bertjax.utils.json_files import write_json

# Minimum and maximum size of a chunk. Small texts have small chunks, to keep all workers busy. Large texts have large
# chunks, to limit the number of chunks.
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2 << 20, 64 << 20
_CHUNKS = 2048

# Fields of a document: sentence count (may be 0), token count, UTF-8 bytes, and a hash of its sentences. If the
# document was read in several pieces, the hash covers the first piece only.
DOCUMENT_DTYPE = np.dtype([("sentences", "<u8"), ("tokens", "<u8"), ("bytes", "<u8"), ("hash", "<u8")])
_BLOCK_DOCUMENTS = 4096
_BLOCK_ENTRIES = 1 << 20
_BUFFER_BYTES = 1 << 20
_READERS = 32

# Keep one tokenizer per process, because building one is slow and its cache serves all chunks.
_cached_tokenizer = functools.lru_cache(maxsize=1)(Tokenizer)
# Lock the tokenizer, because it is not thread-safe and Beam may run several threads in a process.
_encoder_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive documents that become one shard. Sorting chunks by name restores the order of the text.

    `is_large` marks a single large source, which `divide_chunk` divides. `problems` counts problems of the text that
    were found before encoding.
    """

    name: str
    sources: tuple[Source, ...]
    is_large: bool = False
    problems: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Shard:
    """Encoded chunk on disk."""

    path: str  # path of its files without the suffixes `.tokens`, `.sentences` and `.documents`
    token_dtype: str  # dtype of the tokens, such as "<u2"
    problems: dict[str, int]  # counts of problems in the text, by kind

    def documents(self) -> Iterator[np.ndarray]:
        """Yields arrays of consecutive documents, `DOCUMENT_DTYPE` [n], in order."""
        with as_path(f"{self.path}.documents").open("rb") as file:
            while block := file.read(_BLOCK_DOCUMENTS * DOCUMENT_DTYPE.itemsize):
                yield np.frombuffer(block, DOCUMENT_DTYPE)

    def select(self, array: str, heldout_below: int, heldout: bool) -> Iterator[np.ndarray]:
        """Yields the elements of `tokens` or `sentences` of one split, in blocks, which may be empty.

        Documents with a hash below `heldout_below` are held out. `heldout` selects these, or all others if it is False.
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


def group_sources(sources: Sequence[Source]) -> tuple[list[Chunk], int]:
    """Groups small sources into chunks; a large source is one chunk. Also returns `chunk_chars` for `divide_chunk`."""
    total_bytes = sum(source.size_bytes or 0 for source in sources)
    chunk_bytes = min(max(_MIN_CHUNK_BYTES, total_bytes // _CHUNKS), _MAX_CHUNK_BYTES)
    groups: list[tuple[bool, list[Source]]] = []
    group_bytes = math.inf
    for source in sources:
        is_large = source.size_bytes is None or source.size_bytes > 2 * chunk_bytes
        if is_large or group_bytes >= chunk_bytes:
            groups.append((is_large, []))
            group_bytes = 0
        groups[-1][1].append(source)
        group_bytes = math.inf if is_large else group_bytes + (source.size_bytes or 0)
    chunks = [Chunk(f"{number:08d}", tuple(group), large) for number, (large, group) in enumerate(groups)]
    return chunks, chunk_bytes


def divide_chunk(
    chunk: Chunk, work: AnyPath, chunk_chars: int, advance: Callable[[int], object] = lambda num_bytes: None
) -> Iterator[Chunk]:
    """Divides a large chunk into chunks of whole documents, each in a file of about `chunk_chars` characters.

    Yields each new chunk as soon as its file is complete; yields a small `chunk` unchanged. For `advance`, see
    `readers.read`.
    """
    if not chunk.is_large:
        advance(sum(source.size_bytes or 0 for source in chunk.sources))
        yield chunk
        return

    problems: Counter[str] = Counter()
    for number, texts in enumerate(grouped(_read(chunk, problems, advance), chunk_chars)):
        name = f"{chunk.name}-{number:08d}"
        with atomic_file(work / f"{name}.texts") as path, open(path, "wb") as file:
            readers.write_texts(texts, file)
        yield Chunk(name, (Source("texts", str(work / f"{name}.texts"), None),))
    # Yield the problem counts last, in a chunk without text, because they are known only at the end.
    yield Chunk(f"{chunk.name}-problems", (), problems=dict(problems))


def encode_chunk(chunk: Chunk, vocabulary: Vocabulary, work: AnyPath) -> Shard:
    """Splits the texts of a chunk into sentences, tokenizes them, and writes them as one shard."""
    done = work / f"{chunk.name}.json"
    if not done.exists():
        with _encoder_lock:
            shard = _write_shard(chunk, vocabulary, work)
        write_json(done, dataclasses.asdict(shard))
    return Shard(**read_json(done))


def _write_shard(chunk: Chunk, vocabulary: Vocabulary, work: AnyPath) -> Shard:
    problems = Counter(chunk.problems)
    tokenizer = _cached_tokenizer(vocabulary)
    dtype = token_dtype(vocabulary.size)
    # The last document, which the next text may continue: `DOCUMENT_DTYPE` [1], or empty before the first document.
    last = np.empty(0, DOCUMENT_DTYPE)
    with contextlib.ExitStack() as stack:
        files = {}
        for array in ARRAYS:
            file = stack.enter_context(atomic_file(work / f"{chunk.name}.{array}"))
            files[array] = stack.enter_context(open(file, "wb", _BUFFER_BYTES))
        for text in _read(chunk, problems):
            sentences = split_sentences(text.text, text.layout, problems)
            encoded = with_spaces(sentences, text) if tokenizer.missing_prefix else sentences
            ids = [sentence_ids for sentence_ids in tokenizer.encode_all(encoded) if sentence_ids]
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
    return Shard(str(work / chunk.name), dtype.str, dict(problems))


def _read(chunk: Chunk, problems: Counter[str], *advance: Callable[[int], object]) -> Iterator[Text]:
    return itertools.chain.from_iterable(readers.read(source, problems, *advance) for source in chunk.sources)


def plan_splits(shards: Sequence[Shard], heldout_fraction: float) -> tuple[int, dict[str, Any]]:
    """Chooses the held-out documents of a corpus. `shards` are in the order of the text.

    A document is held out if its hash is less than the threshold `heldout_fraction` * 2^64. If a split would then have
    too few documents, and `heldout_fraction` is not 0, `balanced_threshold` changes the threshold. Returns the
    threshold, and the manifest's entries `splits` (counts of each split) and `problems`.
    """
    problems = sum((Counter(shard.problems) for shard in shards), Counter())
    heldout_below = int(heldout_fraction * 2**64)
    splits, problems["documents_without_sentences"], single = _count(shards, heldout_below)
    documents = [split["documents"] for split in splits.values()]
    if 2 * single > sum(documents) > 1:
        problems["single_sentence_documents"] = single
    if not sum(documents):
        counts = "; ".join(f"{name}: {count:,}" for name, count in sorted(problems.items()) if count)
        details = f" ({counts})" if counts else ""
        raise BertjaxError(f"the inputs contain no text, so no corpus was written{details}; check the --input specs")
    if heldout_fraction and min(documents) <= min_documents(sum(documents)):
        blocks = (block for shard in shards for block in shard.documents())
        hashes = np.concatenate([block["hash"][block["sentences"] > 0] for block in blocks])
        heldout_below = balanced_threshold(hashes, heldout_below)
        splits, *_ = _count(shards, heldout_below)
        problems["no_heldout_document"] += splits["heldout"]["documents"] == 0
    return heldout_below, {"splits": splits, "problems": {name: count for name, count in problems.items() if count}}


def _count(shards: Sequence[Shard], heldout_below: int) -> tuple[dict[str, dict[str, int]], int, int]:
    """Counts documents, sentences, tokens and text bytes per split, and documents with no and with one sentence."""

    def count(shard: Shard) -> np.ndarray:
        total = np.zeros((2, 6), np.int64)  # [splits, counts], training split first
        for block in shard.documents():
            is_heldout = block["hash"] < heldout_below
            for row, documents in zip(total, (block[~is_heldout], block[is_heldout]), strict=True):
                written = np.count_nonzero(documents["sentences"])
                sizes = [int(documents[name].sum()) for name in ("sentences", "tokens", "bytes")]
                row += np.array([written, *sizes, documents.size - written, np.sum(documents["sentences"] == 1)])
        return total

    # Use threads to hide the latency of remote storage.
    with ThreadPoolExecutor(_READERS) as pool:
        total = sum(pool.map(count, shards), np.zeros((2, 6), np.int64))
    names = ("documents", "sentences", "tokens", "text_bytes")
    counts = [dict(zip(names, row, strict=True)) for row in total[:, :4].tolist()]
    return dict(zip(SPLITS, counts, strict=True)), *total[:, 4:].sum(axis=0).tolist()


def min_documents(documents: int) -> int:
    """Returns the minimum number of documents per split: 2 (for NotNext segments), but at most half of `documents`."""
    return min(2, documents // 2)


def balanced_threshold(hashes: np.ndarray, heldout_below: int) -> int:
    """Returns the threshold, adjusted so that each split has at least `min_documents` documents, if possible.

    If a split lacks n documents, moves the threshold past the n nearest distinct hashes of the other split, unless the
    other split would then have too few documents. An empty training split always gets a document. Equal documents have
    equal hashes, so they are in the same split. `hashes`, uint64 [documents], are the hashes of all documents with
    sentences.
    """
    is_heldout = hashes < heldout_below
    train, heldout = hashes[~is_heldout], hashes[is_heldout]
    minimum = min_documents(hashes.size)
    threshold = heldout_below
    if heldout.size < minimum:
        threshold = int(np.unique(train)[: minimum - heldout.size][-1]) + 1
    elif train.size < max(minimum, 1):  # The training split needs at least one document.
        threshold = int(np.unique(heldout)[train.size - max(minimum, 1) :][0])
    num_heldout = np.count_nonzero(hashes < threshold)
    has_enough = min(num_heldout, hashes.size - num_heldout) >= minimum or not train.size
    return threshold if has_enough else heldout_below


def write_array(
    folder: AnyPath, split: str, array: str, shards: Sequence[Shard], heldout_below: int
) -> tuple[str, dict[str, Any]]:
    """Writes one array of a corpus split. Returns the name of the array's file and its manifest entry."""
    name = array_file(split, array)
    digest = hashlib.sha256()
    with atomic_file(folder / name) as path:
        with open(path, "wb") as file:
            for block in _blocks(array, shards, heldout_below, split == "heldout"):
                data = block.tobytes()
                digest.update(data)
                file.write(data)
        return name, {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _blocks(array: str, shards: Sequence[Shard], heldout_below: int, heldout: bool) -> Iterator[np.ndarray]:
    if array == "tokens":
        for shard in shards:
            yield from shard.select("tokens", heldout_below, heldout)
        return
    total = np.zeros(1, OFFSET_DTYPE)
    for shard in shards:
        if array == "sentences":
            counts = shard.select("sentences", heldout_below, heldout)
        else:
            blocks = (block[(block["hash"] < heldout_below) == heldout] for block in shard.documents())
            counts = (block["sentences"][block["sentences"] > 0] for block in blocks)
        for block in filter(len, counts):
            ends = total + np.cumsum(block, dtype=OFFSET_DTYPE)
            yield ends - block
            total = ends[-1:]
    yield total
