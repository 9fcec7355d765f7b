"""The pair plan on disk: which spans of the corpus make which row, for several passes over a split.

A plan is a pure function of (corpus, split, seq_len, seed, passes), made once and memory-mapped: no row of it depends
on another at training time, so any row of any epoch is one lookup away. It is written block by block, so neither the
corpus nor the plan has to fit into memory.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bertjax.corpus.mapping import map_file
from bertjax.corpus.progress import progress_bar
from bertjax.corpus.store import Corpus, Split, sample_sha256
from bertjax.data.files import UNFINISHED_SUFFIX, replacing
from bertjax.data.pairs import RECORD, document_pairs, target_lengths
from bertjax.errors import BertjaxError, UsageError

# Changes whenever the same settings give other rows, so that no older plan is taken for a newer one.
_VERSION = 1
_BLOCK_SENTENCES = 1 << 20
_ABANDONED_AFTER_SECONDS = 3600
_PROGRESS_AFTER_SECONDS = 3


@dataclasses.dataclass(frozen=True)
class PairPlan:
    """Sentence pairs of several passes, one pass after the other.

    Attributes:
      records: [rows] `pairs.RECORD`, memory-mapped.
      pass_ends: [passes] int64, rows up to and with each pass.
    """

    records: np.ndarray
    pass_ends: np.ndarray


def pair_plan(corpus: Corpus, split: str, seq_len: int, seed: int, passes: int) -> PairPlan:
    """The plan of a split, from disk if it is there and whole, else made and stored.

    Stored in the corpus' folder `plans`, or in the system's folder for temporary files if that is not writable.
    Processes may do this at the same time: each writes a file of its own and renames it, and all make the same bytes.

    Args:
      corpus: the corpus.
      split: "train" or "heldout".
      seq_len: tokens a row; A and B get seq_len - 3.
      seed: 0 or more; equal seeds give equal plans.
      passes: independent cuts of the whole split, 1 or more.

    Raises:
      UsageError: the split has fewer than two documents, so that no B could come from another one.
      BertjaxError: the plan cannot be written anywhere.
    """
    data: Split = getattr(corpus, split)
    count = max(0, data.documents.size - 1)
    if count < 2:
        raise UsageError(
            f"the {split} split of the corpus {corpus.path} has {count} document(s); sentence pairs need at least 2: "
            "prepare more text, or use objective 'none'"
        )
    settings = {
        "version": _VERSION,
        "corpus": corpus.fingerprint,
        "split": split,
        "seq_len": seq_len,
        "seed": seed,
        "passes": passes,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    name = f"pairs-{split}-{seq_len}-{key}"
    folders = _folders(corpus)
    for folder in folders:
        plan = _read(folder / name, settings)
        if plan is not None:
            return plan
    problems = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / name, settings, data)
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
            continue
        plan = _read(folder / name, settings)
        if plan is not None:
            return plan
        problems.append(f"{folder}: the file does not read back as written")
    raise BertjaxError(f"cannot store the pair plan ({'; '.join(problems)}); free some space or set TMPDIR")


def _folders(corpus: Corpus) -> tuple[Path, Path]:
    return corpus.path / "plans", Path(tempfile.gettempdir()) / f"bertjax-plans-{os.getuid()}"


def _read(path: Path, settings: dict[str, Any]) -> PairPlan | None:
    """Maps a stored plan; None if there is none, or it is of other settings, cut short or changed."""
    records = path.with_suffix(".bin")
    try:
        header = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        ends = np.array(header["pass_ends"], np.int64)
        whole = (
            header["settings"] == settings
            and records.stat().st_size == ends[-1] * RECORD.itemsize
            and sample_sha256(records) == header["sample_sha256"]
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return PairPlan(map_file(records, RECORD), ends) if whole else None


def _write(path: Path, settings: dict[str, Any], split: Split) -> None:
    _remove_abandoned(path.parent)
    ends, rows = [], 0
    with replacing(path.with_suffix(".bin")) as unfinished:
        # Unbuffered: a full disk shows at the write that met it.
        with (
            open(unfinished, "wb", buffering=0) as file,
            progress_bar(
                f"sentence pairs at length {settings['seq_len']}",
                settings["passes"] * int(split.sentences[-1]),
                " tokens",
                after_seconds=_PROGRESS_AFTER_SECONDS,
            ) as progress,
        ):
            for pass_index in range(settings["passes"]):
                for block, tokens in _blocks(split, settings["seq_len"], settings["seed"], pass_index):
                    for records in block:
                        _write_all(file, records.view(np.uint8).data)
                        rows += records.size
                    progress.update(tokens)
                ends.append(rows)
        checksum = sample_sha256(unfinished)
    with replacing(path.with_suffix(".json")) as unfinished:
        header = {"settings": settings, "pass_ends": ends, "sample_sha256": checksum}
        unfinished.write_text(json.dumps(header, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _write_all(file: Any, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _blocks(split: Split, seq_len: int, seed: int, pass_index: int) -> Iterator[tuple[Iterator[np.ndarray], int]]:
    """The pairs of one pass by blocks of documents, and the tokens of each block."""
    # A view as signed integers: numpy would turn the whole array into floats to search for signed values in it.
    sentences, documents = np.asarray(split.sentences).view(np.int64), np.asarray(split.documents).view(np.int64)
    first, count = 0, documents.size - 1
    while first < count:
        last = int(np.searchsorted(documents, documents[first] + _BLOCK_SENTENCES))
        last = min(max(last, first + 1), count)
        lengths = np.diff(sentences[documents[first : last + 1]])
        targets = target_lengths(lengths, seq_len - 3, pass_index, _generator(seed, first))
        pairs = document_pairs(sentences, documents, first, targets, _generator(seed, first, pass_index + 1))
        yield pairs, int(lengths.sum())
        first = last


def _generator(*seeds: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seeds)))


def _remove_abandoned(folder: Path) -> None:
    """Removes what killed processes left; a live one writes to its file all the time."""
    for file in folder.glob(f".pairs-*{UNFINISHED_SUFFIX}"):
        with contextlib.suppress(OSError):
            if time.time() - file.stat().st_mtime > _ABANDONED_AFTER_SECONDS:
                file.unlink()
