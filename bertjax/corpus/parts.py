"""Parts of a corpus, made anywhere, in any order, any number of times, and put together in the order of their names.

What is to be read is cut into chunks of whole documents; each chunk is encoded to a file, its part; the parts, one
after the other, are the corpus, which is written in files of equal size. Each step leaves its result under a name that
depends on the input alone, whole or not at all, and finds it where it was done before: a step that is done again, or
twice at the same time, adds nothing.
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
from typing import Any

import numpy as np
from etils import epath

from bertjax.corpus import encoding, heldout, merging, readers, store
from bertjax.corpus.blocks import checksums_of
from bertjax.corpus.layouts import Text
from bertjax.corpus.output import INDEX, INDEX_DTYPE, CorpusWriter, check_documents
from bertjax.corpus.readers import Source
from bertjax.corpus.tokenizer import Vocabulary, load_vocabulary
from bertjax.files import path_of, read_json, write_at_once, writing

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
            for name, entry in _dtypes(dtype).items():
                if (each, name) == (split, array):
                    with path_of(self.path).open("rb") as file:
                        file.seek(start + first * entry.itemsize)
                        return np.frombuffer(file.read((last - first) * entry.itemsize), entry)
                start += _entries(self.counts[each], name) * entry.itemsize
        raise ValueError(f"a part has no {split}.{array}")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One file of the corpus.

    Attributes:
      split, array: that it has a piece of.
      shard, shards: which of how many.
      spans: of parts, each with the split that they were held to be.
      token_dtype: of tokens.
    """

    split: str
    array: str
    shard: int
    shards: int
    spans: tuple[merging.Span, ...]
    token_dtype: str


@dataclasses.dataclass(frozen=True)
class Merged:
    """What the parts come to.

    Attributes:
      pieces: to be written.
      splits: counts of each split.
      problems: of all parts.
    """

    pieces: tuple[Piece, ...]
    splits: dict[str, dict[str, int]]
    problems: dict[str, int]


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
            with writing(work / f"{chunk.name}-{number:08d}.texts") as path, open(path, "wb") as file:
                readers.write_texts(group, file)
            pieces = number + 1
        write_at_once(done, json.dumps({"pieces": pieces, "problems": problems}))
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
        with writing(path) as here:
            counts = _write_arrays(texts, recipe, here, problems)
        write_at_once(done, json.dumps({"counts": counts, "problems": problems}))
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


def _dtypes(tokens: np.dtype) -> dict[str, np.dtype]:
    return {**store.dtypes(tokens), INDEX: INDEX_DTYPE}


def _entries(counts: dict[str, int], array: str) -> int:
    if array == "tokens":
        return counts["tokens"]
    return counts["documents"] if array == INDEX else counts[array] + 1


def merge(parts: Iterable[tuple[str, Part]], recipe: Recipe, shard_bytes: int, problems: dict[str, int]) -> Merged:
    """What the parts, each with the name of its chunk, come to in the order of the names.

    Args:
      shard_bytes: of each file of an array but its last, some whole blocks.
      problems: met besides.

    Raises:
      BertjaxError: there is no document.
    """
    ordered = [part for _, part in sorted(parts, key=lambda named: named[0])]
    met = sum((Counter(part.problems) for part in ordered), Counter(problems))
    dtype = store.token_dtype(recipe.vocabulary().size)
    runs = {split: [_whole(part, split) for part in ordered] for split in store.SPLITS}
    text_bytes = {split: sum(part.counts[split]["text_bytes"] for part in ordered) for split in store.SPLITS}
    documents = [_total(runs[split], "documents") for split in store.SPLITS]
    check_documents(sum(documents), met)
    if recipe.heldout_share and min(documents) <= heldout.fewest_documents(sum(documents)):
        # Of next to no documents held out, or trained on: this reads a few numbers of each document.
        runs, moved_bytes = _filled(ordered, runs, dtype)
        text_bytes = {"train": text_bytes["train"] - moved_bytes, "heldout": text_bytes["heldout"] + moved_bytes}
        met["no_heldout_document"] += _total(runs["heldout"], "documents") == 0
    splits = {
        split: {
            **{counted: _total(runs[split], counted) for counted in ("documents", "sentences", "tokens")},
            "text_bytes": text_bytes[split],
        }
        for split in store.SPLITS
    }
    pieces = []
    for split in store.SPLITS:
        for array, entry in store.dtypes(dtype).items():
            spans = merging.spans_of(runs[split], array)
            found = list(merging.pieces_of(spans, shard_bytes // entry.itemsize))
            pieces += [
                Piece(split, array, number, len(found), tuple(piece), dtype.str) for number, piece in enumerate(found)
            ]
    return Merged(tuple(pieces), splits, dict(met))


def _whole(part: Part, split: str) -> merging.Run:
    counts = part.counts[split]
    return merging.Run((part, split), *((0, counts[name]) for name in ("documents", "sentences", "tokens")))


def _total(runs: Iterable[merging.Run], counted: str) -> int:
    return sum(last - first for first, last in (getattr(run, counted) for run in runs))


def _filled(
    parts: Sequence[Part], runs: dict[str, list[merging.Run]], dtype: np.dtype
) -> tuple[dict[str, list[merging.Run]], int]:
    """The runs with documents moved, those last, so that neither split lacks any; text bytes moved from training."""
    index = {
        split: np.concatenate([part.read(split, INDEX, 0, part.counts[split]["documents"], dtype) for part in parts])
        for split in store.SPLITS
    }
    moving = dict(zip(store.SPLITS, heldout.to_move(*(index[split]["hash"] for split in store.SPLITS)), strict=True))
    moved_bytes = {split: int(index[split]["bytes"][moving[split]].sum()) for split in store.SPLITS}
    kept: dict[str, list[merging.Run]] = {split: [] for split in store.SPLITS}
    moved: dict[str, list[merging.Run]] = {split: [] for split in store.SPLITS}
    for split, other in zip(store.SPLITS, reversed(store.SPLITS), strict=True):
        start = 0
        for part, run in zip(parts, runs[split], strict=True):
            count = part.counts[split]["documents"]
            chosen = moving[split][(moving[split] >= start) & (moving[split] < start + count)] - start
            start += count
            if not chosen.size:
                kept[split].append(run)
                continue
            arrays = [
                part.read(split, name, 0, _entries(part.counts[split], name), dtype)
                for name in ("sentences", "documents")
            ]
            kept[split] += merging.runs_without(run.part, *arrays, chosen)
            moved[other] += [merging.run_of(run.part, *arrays, int(i), int(i) + 1) for i in chosen]
    return {split: kept[split] + moved[split] for split in store.SPLITS}, moved_bytes["train"] - moved_bytes["heldout"]


def write_piece(piece: Piece, directory: Path | epath.Path) -> dict[str, Any]:
    """Writes one file of the corpus.

    Returns:
      Its name, `bytes` and `sha256`, which array it is of, and in hexadecimal the CRC-32 of its blocks.
    """
    name = store.shard_file(piece.split, piece.array, piece.shard, piece.shards)
    dtype = np.dtype(piece.token_dtype)

    def read(part: tuple[Part, str], array: str, first: int, last: int) -> np.ndarray:
        return part[0].read(part[1], array, first, last, dtype)

    with writing(directory / name) as here:
        with open(here, "wb") as file:
            merging.write(piece.spans, piece.array, read, file)
        checksums = checksums_of(here)
        size = here.stat().st_size
    return {
        "name": name,
        "array": f"{piece.split}.{piece.array}",
        "bytes": size,
        "sha256": checksums.sha256,
        "blocks": checksums.blocks.tobytes().hex(),
    }
