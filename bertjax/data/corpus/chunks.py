"""Pipeline steps that create the shards of a corpus on many machines.

The steps divide the inputs into chunks of whole documents, and encode each chunk to a shard. A step first writes its
result to files whose names depend only on the step's input. Then it writes a small JSON file that marks the result as
complete. If a step runs again, it finds this file and does nothing. Copies of a step that run concurrently write equal
files.
"""

import dataclasses
import itertools
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from bertjax.data.corpus import readers
from bertjax.data.corpus.documents import Text, batches
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.shards import Shard, ShardWriter, encode_batch
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.utils.io import AnyPath, atomic_file, read_json, write_atomic

# Minimum and maximum size of a chunk. Small texts have small chunks, to keep all workers busy. Large texts have large
# chunks, to limit the number of chunks.
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2 << 20, 64 << 20
_CHUNKS = 2048

# Beam may run several threads in a process, but `encode_batch` is not thread-safe.
_encoder_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive documents that become one shard.

    Attributes:
      name: name of the chunk; chunk names sort in the order of the text.
      sources: inputs to read.
      problems: number of occurrences of each problem that was found while a large source was divided into chunks.
    """

    name: str
    sources: tuple[Source, ...]
    problems: dict[str, int] = dataclasses.field(default_factory=dict)


def group_sources(sources: Sequence[Source]) -> tuple[list[Chunk], list[Chunk], int]:
    """Groups small sources into chunks. Each large source becomes a chunk that `divide_chunk` must divide.

    Returns:
      A tuple of three values. First, the chunks of small sources. Second, the chunks that contain one large source
      each. Third, the argument `chunk_chars` of `divide_chunk`.
    """
    total_bytes = sum(source.size_bytes or 0 for source in sources)
    chunk_bytes = min(max(_MIN_CHUNK_BYTES, total_bytes // _CHUNKS), _MAX_CHUNK_BYTES)
    small_chunks: list[Chunk] = []
    large_chunks: list[Chunk] = []
    group: list[Source] = []

    def close_group(chunks: list[Chunk]) -> None:
        if group:
            chunks.append(Chunk(f"{len(small_chunks) + len(large_chunks):08d}", tuple(group)))
            group.clear()

    for source in sources:
        if source.size_bytes is None or source.size_bytes > 2 * chunk_bytes:
            close_group(small_chunks)
            group.append(source)
            close_group(large_chunks)
        else:
            group.append(source)
            if sum(each.size_bytes or 0 for each in group) >= chunk_bytes:
                close_group(small_chunks)
    close_group(small_chunks)
    return small_chunks, large_chunks, chunk_bytes


def divide_chunk(chunk: Chunk, work: AnyPath, chunk_chars: int) -> list[Chunk]:
    """Divides a large source into chunks of whole documents, in files of about `chunk_chars` characters each."""
    done = work / f"{chunk.name}.cut"
    if not done.exists():
        problems: Counter[str] = Counter()
        count = 0
        for number, texts in itertools.groupby(_read(chunk, problems), _ChunkNumber(chunk_chars)):
            with atomic_file(work / f"{chunk.name}-{number:08d}.texts") as path, open(path, "wb") as file:
                readers.write_texts(texts, file)
            count = number + 1
        write_atomic(done, json.dumps({"chunks": count, "problems": problems}))
    result = read_json(done)
    names = [f"{chunk.name}-{number:08d}" for number in range(result["chunks"])]
    # A source without text becomes one empty chunk, so that its read problems are still counted.
    chunks = [Chunk(name, (Source("texts", str(work / f"{name}.texts"), None),)) for name in names] or [
        Chunk(chunk.name, ())
    ]
    return [dataclasses.replace(chunks[0], problems=result["problems"]), *chunks[1:]]


class _ChunkNumber:
    """Callable that returns the chunk number of each text; all texts of a document get the same number."""

    def __init__(self, chunk_chars: int) -> None:
        self._chunk_chars = chunk_chars
        self._number = self._chars = 0

    def __call__(self, text: Text) -> int:
        if not text.continues and self._chars >= self._chunk_chars:
            self._number, self._chars = self._number + 1, 0
        self._chars += len(text.text)
        return self._number


def encode_chunk(chunk: Chunk, vocabulary: Vocabulary, work: AnyPath) -> Shard:
    """Encodes a chunk to a shard."""
    done = work / f"{chunk.name}.json"
    if not done.exists():
        problems = Counter(chunk.problems)
        with ShardWriter(work / chunk.name, vocabulary.size) as writer:
            for batch in batches(_read(chunk, problems)):
                with _encoder_lock:
                    encoded = encode_batch(batch, vocabulary, os.cpu_count() or 1)
                problems.update(encoded.problems)
                writer.add(encoded)
            shard = writer.finish(problems)
        write_atomic(done, json.dumps(dataclasses.asdict(shard)))
    return Shard(**read_json(done))


def _read(chunk: Chunk, problems: Counter[str]) -> Iterator[Text]:
    return itertools.chain.from_iterable(readers.read(source, problems) for source in chunk.sources)
