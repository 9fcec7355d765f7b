"""What a command may do and leave behind, whatever was done to it."""

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bertjax.errors import STOPPED

# Of what the program says in a line, and its name before it.
LONGEST_LINE = 2000 + len("bertjax: ")
# A progress bar goes back to the beginning of its line.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_TRACEBACK = re.compile("^ *Traceback |^Exception (ignored )?in ", re.MULTILINE)
_NOISE = re.compile(r"^(WARNING|ERROR|CRITICAL|\S*Warning\b|[IWEF]\d{4} \d\d:\d\d|\S+\.(py|cc):\d+)", re.MULTILINE)
_STAMPED = ("timing.jsonl", "events.out.*", "curves.png", "origin.json", ".lock")
# What the numbers of a run, and the answers of its checkpoints, are told by.
_OF_A_RUN = ("metrics.jsonl", "results.json", "sweep.json", "config.json", "output_layer.json", "vocab*", "*.model")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command ended.

    Attributes:
      argv: without the program.
      code: the exit code, minus the signal's number where one ended it; None if it was still running at its limit.
      out, err: what it printed.
      seconds: it ran.
    """

    argv: tuple[str, ...]
    code: int | None
    out: str
    err: str
    seconds: float

    @property
    def last_line(self) -> str:
        lines = self.err.strip().splitlines()
        return lines[-1] if lines else ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What came of a case.

    Attributes:
      row: of the summary.
      outcome: column of the summary, a word.
      faults: what went against the promise; none is how it should be.
      detail: for a person who is to mend it.
      command: that was run.
      blows: kills, or 1.
    """

    row: str
    outcome: str
    faults: tuple[str, ...]
    detail: str
    command: tuple[str, ...]
    blows: int = 1


def faults_of(outcome: Outcome, codes: Iterable[int] = (0, 1, 2)) -> list[str]:
    """What is wrong with how a command ended, a word each; see the words below.

    Args:
      codes: that it may end with.
    """
    if outcome.code is None:
        return ["hang"]
    found = []
    said = outcome.out + "\n" + outcome.err
    if _TRACEBACK.search(said):
        found.append("traceback")
    elif _NOISE.search(outcome.err):
        found.append("noise")
    if "(unexpected;" in outcome.err:
        found.append("unexpected")
    if outcome.code not in codes:
        found.append(f"exit {outcome.code}")
    ours = [line for line in outcome.err.splitlines() if line.startswith("bertjax: ")]
    if outcome.code == STOPPED:
        # No error, but one has to know how it goes on.
        found += [] if "same command goes on from here" in outcome.err else ["lost line"]
    elif outcome.code > 0 and (len(ours) != 1 or ours[0] != outcome.last_line):
        found.append("lost line")
    if any(len(line) > LONGEST_LINE for line in ours):
        found.append("long line")
    # What the user typed may be shown as typed where it is the answer.
    said = outcome.err + outcome.out.translate({ord(char): None for char in "".join(outcome.argv)})
    if _CONTROL.search(said):
        found.append("control characters")
    if "File too large" in outcome.err:
        found.append("flood")
    return found


def temporary_left(folder: Path) -> list[str]:
    """Names in a temporary folder that a command has left there, but for what runs share where a corpus cannot be
    written: pair plans."""
    return sorted(name for name in os.listdir(folder) if not name.startswith("bertjax-pair-index-"))


def entries(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything under a folder by its path, with what changes when it is written to."""
    found: dict[str, tuple[Any, ...]] = {}
    if not folder.is_dir():
        return found
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            info = os.lstat(path)
            stamp = () if name in folders else (info.st_size, info.st_mtime_ns)
            found[os.path.relpath(path, folder)] = (info.st_mode, info.st_ino, *stamp)
    return found


def changed(before: dict[str, tuple[Any, ...]], after: dict[str, tuple[Any, ...]]) -> tuple[list[str], list[str]]:
    """Paths that are new, and paths that are gone or have been written to."""
    return (
        sorted(after.keys() - before.keys()),
        sorted(path for path, stamp in before.items() if after.get(path) != stamp),
    )


def state(place: Path, folder: Path | None = None) -> dict[str, str]:
    """What a command left at a place: path to a hash of its content, but for what depends on the clock.

    The path of `folder`, by default the place, is left out wherever it stands in a file. Of a workdir: numbers, what
    goes with the parameters, and the arrays of the newest checkpoint, bit for bit.
    """
    if not place.is_dir():
        return {place.name: _hash(place.read_bytes())} if place.exists() else {}
    found = {}
    checkpoints = place / "checkpoints"
    if checkpoints.is_dir():
        newest = newest_checkpoint(place)
        if newest is not None:
            arrays = checkpoint_arrays(checkpoints / str(newest))
            found |= {f"checkpoints/{newest}/{name}": _hash(data) for name, data in arrays.items()}
        files = [file for pattern in _OF_A_RUN for file in place.glob(pattern)]
    elif (place / "reproduce.json").is_file():
        files = []
        for run in sorted(path for path in place.iterdir() if path.is_dir()):
            found |= {f"{run.name}/{name}": value for name, value in state(run, folder or place).items()}
    elif (place / "trials").is_dir():
        files = [place / "sweep.json"]
        for trial in sorted((place / "trials").iterdir()):
            found |= {f"trials/{trial.name}/{name}": value for name, value in state(trial, folder).items()}
    else:
        files = [file for file in place.rglob("*") if file.is_file()]
    for file in files:
        if file.is_file() and not any(file.match(pattern) for pattern in _STAMPED):
            content = file.read_bytes().replace(os.fsencode((folder or place).resolve()), b"@")
            found[str(file.relative_to(place))] = _hash(content)
    return found


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def checkpoint_entries(workdir: Path, unfinished: bool) -> list[str]:
    """Names under `checkpoints`: of whole checkpoints, or of those being written."""
    try:
        names = os.listdir(workdir / "checkpoints")
    except FileNotFoundError:
        return []
    return [name for name in names if ("tmp" in name) == unfinished and name[0].isdigit()]


def newest_checkpoint(workdir: Path) -> int | None:
    return max(map(int, checkpoint_entries(workdir, unfinished=False)), default=None)


def checkpoint_arrays(checkpoint: Path) -> dict[str, bytes]:
    """Name to stored bytes of every array in a checkpoint, read past Orbax, and what else is kept of the run."""
    import tensorstore

    found = {}
    for item in ("params", "training"):
        if (checkpoint / item).is_dir():
            store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{checkpoint / item}/"}).result()
            for key in store.list().result():
                found[f"{item}/{key.decode()}"] = store.read(key).result().value
    found["meta"] = (checkpoint / "meta" / "metadata").read_bytes()
    return found


def differences(left: dict[str, str], right: dict[str, str]) -> list[str]:
    """Names under which two states differ."""
    return sorted(name for name in {*left, *right} if left.get(name) != right.get(name))


def is_json_of(check: Callable[[Any], bool]) -> Callable[[bytes], bool]:
    """A test of a file's content: is it JSON, and such?"""

    def fits(content: bytes) -> bool:
        try:
            return check(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    return fits
