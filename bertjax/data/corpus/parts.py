"""Parts of a corpus, made anywhere, in any order, any number of times; `joining` puts them together.

What is to be read is cut into chunks of whole documents, and each chunk is encoded to a file, its part. Each step
leaves its result under a name that depends on the input alone, whole or not at all, and finds it where it was done
before: a step that is done again, or twice at the same time, adds nothing.
"""

import dataclasses
import functools
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from etils import epath

from bertjax.data.corpus import encoding, readers, store
from bertjax.data.corpus.layouts import Text
from bertjax.data.corpus.output import INDEX, INDEX_DTYPE, CorpusWriter
from bertjax.data.corpus.readers import Source
from bertjax.data.corpus.tokenizer import Vocabulary, load_vocabulary
from bertjax.utils.io import as_path, atomic_file, read_json, write_atomic

# A chunk is a small share of a small text, for each worker to get some, and large enough where there are many.
_CHUNK_BYTES = (2 << 20, 64 << 20)
_CHUNKS = 2048

_tokenizing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one part is made of.

    Attributes:
      name: in the order of the text.
      sources: to read.
      problems: met in reading what the sources were made of.
    """

    name: str
    sources: tuple[Source, ...]
    problems: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A vocabulary and how text is encoded with it.

    Attributes:
      name, content: of the vocabulary's file.
      lower_case: whether it lower-cases.
      heldout_share: of documents.
    """

    name: str
    content: bytes
    lower_case: bool
    heldout_share: float

    def vocabulary(self) -> Vocabulary:
        return load_vocabulary(Path(self.name), self.lower_case, self.content)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part and where in its file each array begins.

    Attributes:
      path: of the file.
      counts: of each split, as a manifest has them.
      problems: met in reading and encoding it.
    """

    path: str
    counts: dict[str, dict[str, int]]
    problems: dict[str, int]

    def read(self, split: str, array: str, first: int, last: int, dtype: np.dtype) -> np.ndarray:
        """Numbers `first` to `last - 1` of one array of one split.

        Args:
          dtype: of tokens.
        """
        start = 0
        for each in store.SPLITS:
            for name, entry in dtypes_of(dtype).items():
                if (each, name) == (split, array):
                    with as_path(self.path).open("rb") as file:
                        file.seek(start + first * entry.itemsize)
                        return np.frombuffer(file.read((last - first) * entry.itemsize), entry)
                start += entries_of(self.counts[each], name) * entry.itemsize
        raise ValueError(f"a part has no {split}.{array}")


def chunks_of(sources: Sequence[Source]) -> tuple[list[Chunk], list[Chunk], int]:
    """Chunks of sources that are small, chunks of one that is to be cut, and characters of a chunk."""
    total = sum(source.size_bytes or 0 for source in sources)
    least, most = _CHUNK_BYTES
    size = min(max(least, total // _CHUNKS), most)
    small: list[Chunk] = []
    large: list[Chunk] = []
    gathered: list[Source] = []
    numbers = itertools.count()

    def close() -> None:
        if gathered:
            small.append(Chunk(f"{next(numbers):08d}", tuple(gathered)))
            gathered.clear()

    for source in sources:
        if source.size_bytes is None or source.size_bytes > 2 * size:
            close()
            large.append(Chunk(f"{next(numbers):08d}", (source,)))
            continue
        gathered.append(source)
        if sum(each.size_bytes or 0 for each in gathered) >= size:
            close()
    close()
    return small, large, size


def cut(chunk: Chunk, work: Path | epath.Path, size: int) -> list[Chunk]:
    """Reads one large source to files of about `size` characters, each a chunk of whole documents."""
    done = work / f"{chunk.name}.cut"
    if not done.exists():
        problems: Counter[str] = Counter()
        texts = itertools.chain.from_iterable(
            readers.read(source, problems, lambda _: None) for source in chunk.sources
        )
        pieces = 0
        for number, group in itertools.groupby(texts, _Numbering(size)):
            with atomic_file(work / f"{chunk.name}-{number:08d}.texts") as path, open(path, "wb") as file:
                readers.write_texts(group, file)
            pieces = number + 1
        write_atomic(done, json.dumps({"pieces": pieces, "problems": problems}))
    found = read_json(done)
    # Of a source without text, one chunk that tells what was met.
    names = [f"{chunk.name}-{number:08d}" for number in range(found["pieces"])]
    pieces = [Chunk(name, (Source("texts", str(work / f"{name}.texts"), None),)) for name in names] or [
        Chunk(chunk.name, ())
    ]
    return [dataclasses.replace(pieces[0], problems=found["problems"]), *pieces[1:]]


class _Numbering:
    """Numbers texts by the chunk they are in; a document is in one chunk, whatever its length."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._number = self._chars = 0

    def __call__(self, text: Text) -> int:
        if not text.continues and self._chars >= self._size:
            self._number, self._chars = self._number + 1, 0
        self._chars += len(text.text)
        return self._number


def encode(chunk: Chunk, recipe: Recipe, work: Path | epath.Path) -> Part:
    """Makes the part of a chunk, a batch at a time."""
    done = work / f"{chunk.name}.json"
    path = work / f"{chunk.name}.part"
    if not done.exists():
        problems = Counter(chunk.problems)
        texts = itertools.chain.from_iterable(
            readers.read(source, problems, lambda _: None) for source in chunk.sources
        )
        with atomic_file(path) as here:
            counts = _write_arrays(texts, recipe, here, problems)
        write_atomic(done, json.dumps({"counts": counts, "problems": problems}))
    found = read_json(done)
    return Part(str(path), found["counts"], found["problems"])


def _write_arrays(
    texts: Iterable[Text], recipe: Recipe, path: Path, problems: Counter[str]
) -> dict[str, dict[str, int]]:
    # Beside the part, to go where it goes if this process is killed.
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        with CorpusWriter(folder, recipe.vocabulary().size, recipe.heldout_share) as writer:
            for batch in encoding.batches(texts):
                with _tokenizing:
                    encoded = _encoder(recipe).encode(batch)
                problems.update(encoded.problems)
                writer.add(encoded)
            counts = writer.finish_part(problems)
        with open(path, "wb") as file:
            for split in store.SPLITS:
                for array in store.ARRAYS:
                    with open(folder / store.array_file(split, array), "rb") as finished:
                        shutil.copyfileobj(finished, file)
                file.write(writer.index(split).tobytes())
    return counts


@functools.lru_cache(maxsize=1)
def _encoder(recipe: Recipe) -> encoding.Encoder:
    return encoding.Encoder(recipe.vocabulary(), recipe.heldout_share, encoding.cache_entries(os.cpu_count() or 1))


def dtypes_of(tokens: np.dtype) -> dict[str, np.dtype]:
    """Array of a part to its dtype; that of the tokens depends on the vocabulary."""
    return {**store.dtypes(tokens), INDEX: INDEX_DTYPE}


def entries_of(counts: dict[str, int], array: str) -> int:
    """Numbers of one array of a split with these counts."""
    if array == "tokens":
        return counts["tokens"]
    return counts["documents"] if array == INDEX else counts[array] + 1
