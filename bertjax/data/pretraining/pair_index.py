"""Pair index: a file that lists the sentence pairs of every row, optionally with several pairs packed into a row.

One pass divides a split of the corpus into sentence pairs or into pieces of documents, which are pairs with an empty
segment B. The index contains `dupe_factor` passes. It is a pure function of (corpus, split, seq_len, seed, dupe_factor,
pairs_per_row, pairing). It is built once and memory-mapped, so the lookup of any row of any epoch takes constant time.
It is written block by block, so corpus and index may be larger than memory.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.data.corpus.store import Corpus, Split, map_array
from bertjax.data.pretraining.config import PAIR_SPECIAL_TOKENS, TEXT_SPECIAL_TOKENS
from bertjax.data.pretraining.pairs import NEXT_SENTENCE, RECORD, document_pairs, document_pieces, target_lengths
from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.utils.io import (
    CACHE_DIR_VARIABLE,
    atomic_file,
    cache_dir,
    check_free_space,
    file_sha256,
    read_json_object,
    remove_temporaries,
    write_atomic,
)
from bertjax.utils.terminal import progress_bar

# Increment the version if the code changes the rows for the same settings, so that an older index is not reused.
_VERSION = 1
_BLOCK_SENTENCES = 1 << 20
_PROGRESS_AFTER_SECONDS = 3


@dataclasses.dataclass(frozen=True)
class PairIndex:
    """Opened pair index: the sentence pairs of all passes over a split, pass by pass."""

    records: np.ndarray  # memory-mapped pairs in the order of their rows, `pairs.RECORD` [pairs]
    pass_ends: np.ndarray  # exclusive end row of each pass, int64 [passes]
    # (number of rows, pairs per row) of each run of rows with the same number of pairs, int64 [runs, 2].
    runs: np.ndarray


def pack_pairs(
    lengths: np.ndarray, seq_len: int, max_pairs: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Packs pairs into rows by best-fit decreasing: longest pair first, each into the fullest row with enough space.

    `lengths`, int64 [pairs], include special tokens and are at most `seq_len`. `rng` orders pairs of equal length.

    Returns:
      The pair indices in the order of their rows, int64 [pairs], and the number of rows with 0, 1, 2, ... pairs,
      int64 [max_pairs + 1]. Rows are sorted by number of pairs, then by smallest pair index.
    """
    shuffled = rng.permutation(lengths.size)
    # Sort the pairs longest first, with pairs of equal length in random order.
    order = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
    row_of = np.empty(lengths.size, np.int64)
    # `open_rows[n]` is a list of arrays of row numbers. These rows have n free tokens and may receive another pair.
    open_rows: list[list[np.ndarray]] = [[] for _ in range(seq_len + 1)]
    counts = np.zeros(lengths.size, np.int64)
    rows = 0
    bounds = np.flatnonzero(np.diff(lengths[order], prepend=seq_len + 1, append=0))
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        length, waiting = int(lengths[order[start]]), order[start:stop]
        for left in range(length, seq_len):
            while waiting.size and open_rows[left]:
                stack = open_rows[left].pop()
                taken, rest = stack[: waiting.size], stack[waiting.size :]
                if rest.size:
                    open_rows[left].append(rest)
                row_of[waiting[: taken.size]] = taken
                waiting = waiting[taken.size :]
                counts[taken] += 1
                unfilled = taken[counts[taken] < max_pairs]
                if unfilled.size and left > length:
                    open_rows[left - length].append(unfilled)
            if not waiting.size:
                break
        if waiting.size:
            # Put the remaining pairs into new rows, with as many pairs per row as fit.
            new_rows = rows + np.arange(waiting.size) // min(seq_len // length, max_pairs)
            row_of[waiting] = new_rows
            filled = np.bincount(new_rows - rows)
            counts[rows : rows + filled.size] = filled
            for number in np.unique(filled):
                left = seq_len - number * length
                if number < max_pairs and left:
                    open_rows[left].append(rows + np.flatnonzero(filled == number))
            rows += filled.size
    first = np.full(rows, lengths.size, np.int64)
    np.minimum.at(first, row_of, np.arange(lengths.size))
    numbers = np.bincount(row_of, minlength=rows)
    position = np.empty(rows, np.int64)
    position[np.lexsort((first, numbers))] = np.arange(rows)
    return np.argsort(position[row_of], kind="stable"), np.bincount(numbers, minlength=max_pairs + 1)


def documents_problem(corpus: Corpus, split: str, pairing: str) -> str:
    """Returns an error message if a split has too few documents for rows of pairs or documents, else ""."""
    # Pairs need two documents, because segment B of a NotNext pair comes from another document.
    count, needed = getattr(corpus, split).num_documents, 2 if pairing else 1
    problem = f"the {split} split of the corpus {corpus.path} has {count} documents, but needs at least {needed}"
    return "" if count >= needed else f"{problem}; prepare more documents, or change --heldout"


def open_pair_index(
    corpus: Corpus,
    split: str,
    seq_len: int,
    seed: int,
    dupe_factor: int,
    pairs_per_row: int = 1,
    pairing: str = NEXT_SENTENCE,
) -> PairIndex:
    """Opens the pair index of a split, `train` or `heldout`; builds and stores it if it is missing or damaged.

    The index has `dupe_factor` independent passes over the split, and rows of at most `pairs_per_row` pairs. `pairing`
    is a kind of sentence pairs, see `document_pairs`, or "" for pieces of documents, see `document_pieces`.
    The index is stored in the folder `pair_index` of the corpus or, if this fails, in the cache folder of the machine.
    `Corpus.checksums` verifies it in the background. Several processes may build the same index at once.
    """
    if problem := documents_problem(corpus, split, pairing):
        raise UsageError(problem)
    data: Split = getattr(corpus, split)
    settings = {
        "version": _VERSION,
        "corpus": corpus.fingerprint,
        "split": split,
        "seq_len": seq_len,
        "seed": seed,
        "passes": dupe_factor,
        "pairs_per_row": pairs_per_row,
        "pairing": pairing,
    }
    for path in _index_paths(corpus, settings):
        with contextlib.suppress(OSError, ValueError, KeyError):
            return _open(path, settings, corpus)
    # Verify the corpus first, because an index built from damaged offsets would remain after a repair of the corpus.
    corpus.checksums.wait()
    # Estimate one pair per `seq_len` tokens.
    needed_bytes = dupe_factor * int(data.sentences[-1]) // seq_len * RECORD.itemsize
    problems = []
    for path in _index_paths(corpus, settings):
        folder = path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_free_space(
                folder, needed_bytes, f"the pair index of {dupe_factor:,} passes", "lower config.data.dupe_factor"
            )
            _write(path, settings, data)
            return _open(path, settings, corpus)
        except (OSError, BertjaxError) as error:
            problems.append(f"{folder}: {first_line(error)}")
    raise BertjaxError(
        f"cannot store the pair index: {'; '.join(problems)}; free some space or set {CACHE_DIR_VARIABLE} to a "
        "different folder"
    )


def _index_paths(corpus: Corpus, settings: dict[str, Any]) -> Iterator[Path]:
    """Yields the two possible paths of an index, without suffix: in the corpus and in the cache folder."""
    name = f"pairs-{settings['split']}-{settings['seq_len']}-{_json_sha256(settings)[:16]}"
    yield corpus.path / "pair_index" / name
    yield cache_dir() / "pair_index" / name


def _open(path: Path, settings: dict[str, Any], corpus: Corpus) -> PairIndex:
    """Memory-maps a stored index, and adds its checksum to the checksums of the corpus.

    Raises an OSError, ValueError or KeyError if the index is missing, damaged, or has different settings.
    """
    header, records = read_json_object(path.with_suffix(".json")), path.with_suffix(".bin")
    if header.pop("sha256") != _json_sha256(header) or header["settings"] != settings:
        raise ValueError("damaged header")
    pass_ends, runs = (np.array(header[name], np.int64) for name in ("pass_ends", "runs"))
    if records.stat().st_size != runs.prod(axis=1).sum() * RECORD.itemsize:
        raise ValueError("damaged records")
    corpus.checksums.add(records, header["records_sha256"], "delete it, and the next run builds it again")
    return PairIndex(map_array(records, RECORD), pass_ends, runs)


def _write(path: Path, settings: dict[str, Any], split: Split) -> None:
    # Remove temporary files of killed processes. Files of running processes are newer, because they write often.
    remove_temporaries(path.parent, min_age_seconds=3600)
    ends: list[int] = []
    runs: list[list[int]] = []
    rows, seq_len, pairs_per_row = 0, settings["seq_len"], settings["pairs_per_row"]
    special_tokens = PAIR_SPECIAL_TOKENS if settings["pairing"] else TEXT_SPECIAL_TOKENS
    with atomic_file(path.with_suffix(".bin")) as unfinished:
        with (
            open(unfinished, "wb") as file,
            progress_bar(
                f"sentence pairs at length {seq_len}",
                settings["passes"] * int(split.sentences[-1]),
                " tokens",
                after_seconds=_PROGRESS_AFTER_SECONDS,
            ) as progress,
        ):
            for pass_index in range(settings["passes"]):
                for block, tokens in _blocks(split, settings, pass_index):
                    for records in block:
                        numbers = np.array([0, records.size])
                        if pairs_per_row > 1:
                            lengths = records["a_length"].astype(np.int64) + records["b_length"] + special_tokens
                            rng = _generator(settings["seed"], pass_index, rows, 0)
                            order, numbers = pack_pairs(np.minimum(lengths, seq_len), seq_len, pairs_per_row, rng)
                            records = records[order]
                        file.write(records.tobytes())
                        for pairs in np.flatnonzero(numbers):
                            if not runs or runs[-1][1] != pairs:
                                runs.append([0, int(pairs)])
                            runs[-1][0] += int(numbers[pairs])
                        rows += int(numbers.sum())
                    progress.update(tokens)
                ends.append(rows)
        sha256 = file_sha256(unfinished)
    header = {"settings": settings, "pass_ends": ends, "runs": runs, "records_sha256": sha256}
    content = json.dumps({**header, "sha256": _json_sha256(header)}, sort_keys=True)
    write_atomic(path.with_suffix(".json"), content + "\n")


def _json_sha256(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _blocks(split: Split, settings: dict[str, Any], pass_index: int) -> Iterator[tuple[Iterator[np.ndarray], int]]:
    """Yields, for each block of documents in a pass, an iterator over arrays of pairs and the block's token count."""
    seq_len, seed, pairing = settings["seq_len"], settings["seed"], settings["pairing"]
    # View as int64, because `np.searchsorted` would convert an unsigned array to float64 if the values to find are
    # signed.
    sentences, documents = np.asarray(split.sentences).view(np.int64), np.asarray(split.documents).view(np.int64)
    first, count = 0, documents.size - 1
    while first < count:
        last = int(np.searchsorted(documents, documents[first] + _BLOCK_SENTENCES))
        last = min(max(last, first + 1), count)
        lengths, rng = np.diff(sentences[documents[first : last + 1]]), _generator(seed, first, pass_index + 1)
        if pairing:
            targets = target_lengths(lengths, seq_len - PAIR_SPECIAL_TOKENS, pass_index, _generator(seed, first))
            pairs = document_pairs(sentences, documents, first, targets, rng, pairing)
        else:
            pairs = document_pieces(sentences, documents[first : last + 1], seq_len - TEXT_SPECIAL_TOKENS, rng)
        yield pairs, int(lengths.sum())
        first = last


def _generator(*seeds: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds)))
