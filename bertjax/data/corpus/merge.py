"""Merger of shards: writes the arrays of a corpus, in text order and with bounded memory."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from bertjax.data.corpus.chunks import Shard
from bertjax.data.corpus.store import OFFSET_DTYPE, SPLITS, array_file
from bertjax.errors import BertjaxError
from bertjax.utils.io import AnyPath, atomic_file

_READERS = 32


def plan_splits(shards: Sequence[Shard], heldout_fraction: float) -> tuple[int, dict[str, Any]]:
    """Chooses the held-out documents of a corpus. `shards` are in the order of the text.

    A document is held out if its hash is less than the threshold `heldout_fraction` * 2^64. If a split would then have
    too few documents, and `heldout_fraction` is not 0, `balanced_threshold` changes the threshold. Returns the
    threshold, and the manifest's entries `splits` (counts of each split) and `problems`.
    """
    problems = sum((Counter(shard.problems) for shard in shards), Counter())
    heldout_below = int(heldout_fraction * 2**64)
    splits, problems["documents_without_sentences"] = _count(shards, heldout_below)
    documents = [split["documents"] for split in splits.values()]
    if not sum(documents):
        counts = "; ".join(f"{name}: {count:,}" for name, count in sorted(problems.items()) if count)
        details = f" ({counts})" if counts else ""
        raise BertjaxError(f"the inputs contain no text, so no corpus was written{details}; check the --input specs")
    if heldout_fraction and min(documents) <= min_documents(sum(documents)):
        blocks = (block for shard in shards for block in shard.documents())
        hashes = np.concatenate([block["hash"][block["sentences"] > 0] for block in blocks])
        heldout_below = balanced_threshold(hashes, heldout_below)
        splits, _ = _count(shards, heldout_below)
        problems["no_heldout_document"] += splits["heldout"]["documents"] == 0
    return heldout_below, {"splits": splits, "problems": {name: count for name, count in problems.items() if count}}


def _count(shards: Sequence[Shard], heldout_below: int) -> tuple[dict[str, dict[str, int]], int]:
    """Counts documents, sentences, tokens and text bytes of each split, and all documents without sentences."""

    def count(shard: Shard) -> np.ndarray:
        total = np.zeros((2, 5), np.int64)  # [splits, counts], training split first
        for block in shard.documents():
            is_heldout = block["hash"] < heldout_below
            for row, documents in zip(total, (block[~is_heldout], block[is_heldout]), strict=True):
                written = np.count_nonzero(documents["sentences"])
                sizes = [int(documents[name].sum()) for name in ("sentences", "tokens", "bytes")]
                row += np.array([written, *sizes, documents.size - written])
        return total

    # Use threads to hide the latency of remote storage.
    with ThreadPoolExecutor(_READERS) as pool:
        total = sum(pool.map(count, shards), np.zeros((2, 5), np.int64))
    names = ("documents", "sentences", "tokens", "text_bytes")
    counts = [dict(zip(names, row, strict=True)) for row in total[:, :4].tolist()]
    return dict(zip(SPLITS, counts, strict=True)), int(total[:, 4].sum())


def min_documents(documents: int) -> int:
    """Returns the minimum number of documents per split, for a corpus of `documents` documents.

    The minimum is 2 if the corpus has at least 4 documents, because a NotNext segment comes from another document of
    the same split. It is 1 for 2 or 3 documents, and 0 for one document.
    """
    return 2 if documents >= 4 else int(documents >= 2)


def balanced_threshold(hashes: np.ndarray, heldout_below: int) -> int:
    """Returns the threshold, adjusted so that each split has at least `min_documents` documents, if possible.

    If a split lacks n documents, the threshold moves past the n nearest distinct hashes of the other split. It does
    not move if the other split would then have too few documents. An exception is an empty training split, which always
    gets a document. Equal documents have equal hashes, so they are in the same split. `hashes`, uint64 [documents], are
    those of all documents with sentences.
    """
    is_heldout = hashes < heldout_below
    train, heldout = hashes[~is_heldout], hashes[is_heldout]
    minimum = min_documents(hashes.size)
    if heldout.size < minimum:
        threshold = int(np.unique(train)[: minimum - heldout.size][-1]) + 1
        return threshold if np.count_nonzero(train >= threshold) >= minimum else heldout_below
    # The training split needs at least one document.
    if train.size < max(minimum, 1):
        threshold = int(np.unique(heldout)[train.size - max(minimum, 1) :][0])
        has_enough = np.count_nonzero(heldout < threshold) >= minimum or not train.size
        return threshold if has_enough else heldout_below
    return heldout_below


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
