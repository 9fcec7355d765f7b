"""Parts, in the order of their names, as the files of a corpus, each of which can be written anywhere by itself."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from bertjax.data.corpus import heldout, merging, store
from bertjax.data.corpus.blocks import checksums_of
from bertjax.data.corpus.output import INDEX, check_documents
from bertjax.data.corpus.parts import Part, Recipe, entries_of
from bertjax.utils.io import atomic_file


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
                part.read(split, name, 0, entries_of(part.counts[split], name), dtype)
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

    with atomic_file(directory / name) as here:
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
