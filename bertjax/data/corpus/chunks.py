"""Pipeline steps that create the shards of a corpus on many machines.

The steps divide the inputs into chunks of whole documents, and encode each chunk to a shard. A step writes files whose
names depend only on its input, and at last a small JSON file, which shows a repeated step that there is nothing to do.
Copies of a step that run concurrently write equal files.
"""

import dataclasses
import itertools
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

from bertjax.data.corpus import readers
from bertjax.data.corpus.documents import Text, batches
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.shards import EncodedBatch, Shard, encode_batch, write_shard
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
      is_large: whether the chunk is one large source that `divide_chunk` divides.
      problems: number of occurrences of each problem that was found while a large source was divided into chunks.
    """

    name: str
    sources: tuple[Source, ...]
    is_large: bool = False
    problems: dict[str, int] = dataclasses.field(default_factory=dict)


def group_sources(sources: Sequence[Source]) -> tuple[list[Chunk], int]:
    """Groups small sources into chunks. Each large source becomes a chunk of its own.

    Returns:
      A tuple of the chunks and the argument `chunk_chars` of `divide_chunk`.
    """
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


def divide_chunk(chunk: Chunk, work: AnyPath, chunk_chars: int) -> list[Chunk]:
    """Divides a large source into chunks of whole documents, in files of about `chunk_chars` characters each."""
    if not chunk.is_large:
        return [chunk]
    done = work / f"{chunk.name}.cut"
    if not done.exists():
        problems: Counter[str] = Counter()
        count = 0
        for number, texts in itertools.groupby(_numbered(_read(chunk, problems), chunk_chars), itemgetter(0)):
            with atomic_file(work / f"{chunk.name}-{number:08d}.texts") as path, open(path, "wb") as file:
                readers.write_texts((text for _, text in texts), file)
            count = number + 1
        write_atomic(done, json.dumps({"chunks": count, "problems": problems}))
    result = read_json(done)
    names = [f"{chunk.name}-{number:08d}" for number in range(result["chunks"])]
    # A source without text becomes one empty chunk, so that its read problems are still counted.
    chunks = [Chunk(name, (Source("texts", str(work / f"{name}.texts"), None),)) for name in names] or [
        Chunk(chunk.name, ())
    ]
    return [dataclasses.replace(chunks[0], problems=result["problems"]), *chunks[1:]]


def _numbered(texts: Iterable[Text], chunk_chars: int) -> Iterator[tuple[int, Text]]:
    """Yields each text with the number of its chunk; all texts of a document get the same number."""
    number = chars = 0
    for text in texts:
        if not text.continues and chars >= chunk_chars:
            number, chars = number + 1, 0
        chars += len(text.text)
        yield number, text


def encode_chunk(chunk: Chunk, vocabulary: Vocabulary, work: AnyPath) -> Shard:
    """Encodes a chunk to a shard."""
    done = work / f"{chunk.name}.json"
    if not done.exists():
        problems = Counter(chunk.problems)

        def encode(batch: list[Text]) -> EncodedBatch:
            with _encoder_lock:
                return encode_batch(batch, vocabulary, os.cpu_count() or 1)

        shard = write_shard(work / chunk.name, map(encode, batches(_read(chunk, problems))), vocabulary, problems)
        write_atomic(done, json.dumps(dataclasses.asdict(shard)))
    return Shard(**read_json(done))


def _read(chunk: Chunk, problems: Counter[str]) -> Iterator[Text]:
    return itertools.chain.from_iterable(readers.read(source, problems) for source in chunk.sources)
