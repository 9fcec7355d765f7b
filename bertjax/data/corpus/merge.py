"""Merging of shards into the arrays of a corpus, in text order and with bounded memory."""

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bertjax.data.corpus import store
from bertjax.data.corpus.shards import Shard
from bertjax.errors import BertjaxError
from bertjax.utils.io import AnyPath, atomic_file


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive documents of one split of a shard.

    Attributes:
      shard, split: shard and split that contain the documents.
      documents, sentences, tokens: start and end (exclusive) index in the arrays of the split.
    """

    shard: Shard
    split: str
    documents: tuple[int, int]
    sentences: tuple[int, int]
    tokens: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class MergedArray:
    """Array of the corpus, merged from runs of documents by `write_array`.

    Attributes:
      split, name: names of the split and the array.
      runs: all runs of the split, in the order of the corpus.
    """

    split: str
    name: str
    runs: tuple[Run, ...]


@dataclasses.dataclass(frozen=True)
class MergePlan:
    """Arrays of a corpus to write, and counts for its manifest.

    Attributes:
      arrays: arrays of the corpus, which can be written in parallel.
      splits: number of `documents`, `sentences`, `tokens` and `text_bytes` of each split.
      problems: number of occurrences of each problem.
    """

    arrays: tuple[MergedArray, ...]
    splits: dict[str, dict[str, int]]
    problems: dict[str, int]


def plan_merge(shards: Sequence[Shard], heldout_fraction: float, problems: Mapping[str, int]) -> MergePlan:
    """Plans the arrays of a corpus.

    Moves documents between the splits if a split would otherwise have too few documents.

    Args:
      shards: shards in the order of the text.
      heldout_fraction: fraction of documents that were held out, in [0, 1).
      problems: problem counts to add to the counts of the shards.
    """
    all_problems = sum((Counter(shard.problems) for shard in shards), Counter(problems))
    runs = {split: [_whole_split(shard, split) for shard in shards] for split in store.SPLITS}
    text_bytes = {split: sum(shard.counts[split]["text_bytes"] for shard in shards) for split in store.SPLITS}
    documents = [_count(runs[split], "documents") for split in store.SPLITS]
    if not sum(documents):
        counts = "; ".join(f"{name}: {count:,}" for name, count in sorted(all_problems.items()) if count)
        raise BertjaxError(f"the inputs contain no text, so no corpus was written ({counts}); check the --input specs")
    if heldout_fraction and min(documents) <= min_documents(sum(documents)):
        runs, moved_bytes = _balance(shards, runs)
        text_bytes["train"] -= moved_bytes
        text_bytes["heldout"] += moved_bytes
        all_problems["no_heldout_document"] += _count(runs["heldout"], "documents") == 0
    splits = {
        split: {
            **{name: _count(runs[split], name) for name in ("documents", "sentences", "tokens")},
            "text_bytes": text_bytes[split],
        }
        for split in store.SPLITS
    }
    arrays = tuple(MergedArray(split, array, tuple(runs[split])) for split in store.SPLITS for array in store.ARRAYS)
    return MergePlan(arrays, splits, dict(all_problems))


def _whole_split(shard: Shard, split: str) -> Run:
    counts = shard.counts[split]
    return Run(shard, split, (0, counts["documents"]), (0, counts["sentences"]), (0, counts["tokens"]))


def _count(runs: Iterable[Run], name: str) -> int:
    return sum(stop - start for start, stop in (getattr(run, name) for run in runs))


def min_documents(documents: int) -> int:
    """Returns the minimum number of documents per split for a total number of documents.

    The minimum is 2, since a NotNext sentence comes from a different document. It is lower for fewer than 4 documents.
    """
    return 2 if documents >= 4 else int(documents >= 2)


def documents_to_move(train: np.ndarray, heldout: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Chooses documents to move so that each split has `min_documents`.

    The documents with the smallest hashes are held out, so the documents with hashes closest to the threshold move.
    Equal documents have equal hashes and move together.

    Args:
      train: hashes of the training documents, uint64 [documents].
      heldout: hashes of the held-out documents, uint64 [documents].

    Returns:
      A tuple of two sorted index arrays: training documents to hold out, and held-out documents to train on. The
      arrays are empty if no move is needed, or if no move gives both splits enough documents. An empty training
      split receives documents in any case.
    """
    minimum = min_documents(train.size + heldout.size)
    no_move = np.empty(0, np.int64)
    if heldout.size < minimum:
        moved = np.flatnonzero(np.isin(train, np.unique(train)[: minimum - heldout.size]))
        return (moved, no_move) if train.size - moved.size >= minimum else (no_move, no_move)
    # The training split needs at least one document.
    if train.size < max(minimum, 1):
        moved = np.flatnonzero(np.isin(heldout, np.unique(heldout)[::-1][: max(minimum, 1) - train.size]))
        return (no_move, moved) if heldout.size - moved.size >= minimum or not train.size else (no_move, no_move)
    return no_move, no_move


def _balance(shards: Sequence[Shard], runs: dict[str, list[Run]]) -> tuple[dict[str, list[Run]], int]:
    """Moves the documents of `documents_to_move` to the end of the other split.

    Returns:
      The new `Run`s of each split, and the net number of text bytes moved from `train` to `heldout`.
    """
    documents = {
        split: np.concatenate([shard.read_all(split, "documents") for shard in shards]) for split in store.SPLITS
    }
    moves = dict(
        zip(store.SPLITS, documents_to_move(documents["train"]["hash"], documents["heldout"]["hash"]), strict=True)
    )
    staying: dict[str, list[Run]] = {split: [] for split in store.SPLITS}
    moved: dict[str, list[Run]] = {split: [] for split in store.SPLITS}
    for split, other in zip(store.SPLITS, reversed(store.SPLITS), strict=True):
        start = 0
        for run in runs[split]:
            stop = start + run.documents[1]
            indices = moves[split][(moves[split] >= start) & (moves[split] < stop)] - start
            start = stop
            if not indices.size:
                staying[split].append(run)
                continue
            sentences = _starts(run.shard.read_all(split, "documents")["sentences"])
            tokens = _starts(run.shard.read_all(split, "lengths"))
            edges = [-1, *map(int, indices), run.documents[1]]
            for first, last in zip(edges, edges[1:], strict=False):
                if last > first + 1:
                    staying[split].append(_sub_run(run, first + 1, last, sentences, tokens))
            moved[other] += [_sub_run(run, int(i), int(i) + 1, sentences, tokens) for i in indices]
    moved_bytes = {split: int(documents[split]["bytes"][moves[split]].sum()) for split in store.SPLITS}
    return {split: staying[split] + moved[split] for split in store.SPLITS}, moved_bytes["train"] - moved_bytes[
        "heldout"
    ]


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _sub_run(run: Run, first: int, last: int, sentence_starts: np.ndarray, token_starts: np.ndarray) -> Run:
    sentences = int(sentence_starts[first]), int(sentence_starts[last])
    tokens = int(token_starts[sentences[0]]), int(token_starts[sentences[1]])
    return Run(run.shard, run.split, (first, last), sentences, tokens)


def write_array(array: MergedArray, directory: AnyPath) -> tuple[str, dict[str, Any]]:
    """Writes one array of a corpus.

    Returns:
      The name and the manifest entry of the array's file.
    """
    name = store.array_file(array.split, array.name)
    digest = hashlib.sha256()
    with atomic_file(directory / name) as path:
        with open(path, "wb") as file:
            for block in _blocks(array):
                data = block.tobytes()
                digest.update(data)
                file.write(data)
        return name, store.file_entry(path, digest.hexdigest())


def _blocks(array: MergedArray) -> Iterator[np.ndarray]:
    if array.name == "tokens":
        for run in array.runs:
            yield from run.shard.read(run.split, "tokens", *run.tokens)
        return
    total = np.zeros(1, store.OFFSET_DTYPE)
    for run in array.runs:
        if array.name == "sentences":
            counts = run.shard.read(run.split, "lengths", *run.sentences)
        else:
            counts = (block["sentences"] for block in run.shard.read(run.split, "documents", *run.documents))
        for block in counts:
            ends = total + np.cumsum(block, dtype=store.OFFSET_DTYPE)
            yield ends - block
            total = ends[-1:]
    yield total
