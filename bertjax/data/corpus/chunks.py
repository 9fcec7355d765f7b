"""Steps that create the shards of a corpus, for the runners in `prepare.py` and `run_beam.py`.

The steps divide the inputs into chunks of whole documents, and encode each chunk to a shard. A step writes files whose
names depend only on its input. Last, it writes a small JSON file. A repeated step that finds this file is skipped.
Copies of a step that run concurrently write equal files.
"""

import dataclasses
import itertools
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter

from bertjax.data.corpus import readers
from bertjax.data.corpus.documents import Text
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.shards import Shard, write_shard
from bertjax.data.corpus.vocabulary import Vocabulary
from bertjax.utils.io import AnyPath, atomic_file, read_json, write_atomic

# Minimum and maximum size of a chunk. Small texts have small chunks, to keep all workers busy. Large texts have large
# chunks, to limit the number of chunks.
_MIN_CHUNK_BYTES, _MAX_CHUNK_BYTES = 2 << 20, 64 << 20
_CHUNKS = 2048

# Beam may run several threads in a process, but `write_shard` is not thread-safe.
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


def group_sources(sources: Sequence[Source]) -> tuple[list[Chunk], int]:
    """Returns chunks of several small sources or one large source each, and `chunk_chars` for `divide_chunk`."""
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
    """Divides a large source into chunks of whole documents, in files of about `chunk_chars` characters each.

    A chunk is yielded as soon as its file is complete. For `advance`, see `readers.read`.
    """
    if not chunk.is_large:
        yield chunk
        return

    def part(number: int) -> Chunk:
        name = f"{chunk.name}-{number:08d}"
        return Chunk(name, (Source("texts", str(work / f"{name}.texts"), None),))

    done = work / f"{chunk.name}.cut"
    if done.exists():
        yield from map(part, range(read_json(done)["chunks"]))
    else:
        problems: Counter[str] = Counter()
        count = 0
        texts = _numbered(_read(chunk, problems, advance), chunk_chars)
        for number, numbered in itertools.groupby(texts, itemgetter(0)):
            with atomic_file(work / f"{part(number).name}.texts") as path, open(path, "wb") as file:
                readers.write_texts((text for _, text in numbered), file)
            yield part(number)
            count = number + 1
        write_atomic(done, json.dumps({"chunks": count, "problems": problems}))
    # Report the problem counts in a last chunk without text, because they are known only at the end.
    yield Chunk(f"{chunk.name}-problems", (), problems=read_json(done)["problems"])


def _numbered(texts: Iterable[Text], chunk_chars: int) -> Iterator[tuple[int, Text]]:
    """Yields each text with the number of its chunk; all texts of a document get the same number."""
    number = chars = 0
    for text in texts:
        if not text.continues and chars >= chunk_chars:
            number, chars = number + 1, 0
        chars += len(text.text)
        yield number, text


def encode_chunk(chunk: Chunk, vocabulary: Vocabulary, work: AnyPath, workers: int) -> Shard:
    """Encodes a chunk to a shard. `workers` is the number of encoding processes on this machine."""
    done = work / f"{chunk.name}.json"
    if not done.exists():
        problems = Counter(chunk.problems)
        with _encoder_lock:
            shard = write_shard(work / chunk.name, _read(chunk, problems), vocabulary, problems, workers)
        write_atomic(done, json.dumps(dataclasses.asdict(shard)))
    return Shard(**read_json(done))


def _read(chunk: Chunk, problems: Counter[str], *advance: Callable[[int], object]) -> Iterator[Text]:
    return itertools.chain.from_iterable(readers.read(source, problems, *advance) for source in chunk.sources)
