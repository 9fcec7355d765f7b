"""The folder a run lives in: made, locked, and checked before any step is taken."""

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
from etils import epath

from bertjax.config.fields import differences
from bertjax.config.run import PATH_FIELDS
from bertjax.data.corpus.tokenizer import VOCABULARY_FILES
from bertjax.data.corpus.vocabulary_files import ENTRY
from bertjax.errors import BertjaxError, UsageError, listed
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.training.checkpoint import CHECKPOINTS, DAMAGED, absolute
from bertjax.training.checkpoint_metadata import CONFIG
from bertjax.training.metrics import METRICS, TIMING
from bertjax.training.step import TrainState
from bertjax.utils.io import (
    check_free_space,
    is_remote,
    read_json_object,
    remove_temporaries,
    temporary_name,
    write_atomic,
)

DATA = "data.json"
_LOCK = ".lock"
# What a checkpoint of another format was converted from.
ORIGIN = "origin.json"
# A checkpoint of another format that a run starts from, converted.
CONVERTED = "init_from"
RESULTS = "results.json"
CURVES = "curves.png"
CONFUSION = "confusion.png"
# May change when a run goes on: they do not change the numbers it computes.
_MAY_CHANGE = (
    "log_every",
    "eval_every",
    "checkpoint_every",
    "keep_checkpoints",
    "divergence_factor",
    "mesh",
    "cluster",
    "hang_seconds",
    # Another compilation of the same sums, as another mesh is: a machine with other devices or less memory goes on.
    "model.scan_layers",
    "model.remat",
    # Where the data lies, under whatever name, is no matter: its hash is compared.
    *PATH_FIELDS,
)
_SHOWN_DIFFERENCES = 5
# All that may be in the folder of a run, whatever task and version of it.
_OWN = (
    *(CONFIG, DATA, ORIGIN, ENTRY, OUTPUT_LAYER, *VOCABULARY_FILES.values()),
    *(METRICS, TIMING, RESULTS, CURVES, CONFUSION, "events.out.tfevents.*"),
    *(CHECKPOINTS, DAMAGED, CONVERTED, ".*"),
)
# What a shell or a scheduler may have put there before.
_LOGS = ("*.log", "*.out", "*.err")


def place(path: str) -> epath.Path:
    """Where a workdir is to be.

    Raises:
      UsageError: no run may live there.
    """
    workdir = absolute(path)
    if workdir == workdir.parent:
        raise UsageError(
            f"the workdir is {workdir}, the root of the file system, as where a variable of the shell is empty; choose "
            "another --workdir"
        )
    return workdir


def make(path: str, own: Sequence[str] = _OWN, mark: str = CONFIG) -> epath.Path:
    """Makes the workdir where there is none, and finds out whether it can be written.

    Args:
      path: of the workdir.
      own, mark: as `check_own` takes them; of a run.

    Raises:
      UsageError: no run may live there, or something else does.
      BertjaxError: it cannot be written.
    """
    workdir = place(path)
    check_own(workdir, own, mark)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe = workdir / temporary_name("probe")
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise BertjaxError(f"cannot write in the workdir {workdir} ({error}); choose another --workdir") from error
    return workdir


def check_own(workdir: epath.Path, own: Sequence[str], mark: str) -> None:
    """Refuses a folder in which there is something else, with which a run would be mixed.

    Args:
      workdir: the folder, or where one is to be made.
      own: patterns of the names that are expected there, beside those of logs.
      mark: the name that shows that it is a run's already, which goes on whatever else has been put there.

    Raises:
      UsageError: names what is there.
    """
    try:
        names = sorted(entry.name for entry in workdir.iterdir()) if workdir.exists() else []
    except NotADirectoryError as error:
        raise UsageError(f"the workdir {workdir} is a file; choose another --workdir") from error
    expected = (*own, *_LOGS)
    others = [name for name in names if not any(fnmatch(name, pattern) for pattern in expected)]
    if others and mark not in names:
        raise UsageError(f"the workdir {workdir} holds {listed(others, 3)}, of no run; choose another --workdir")
    config = _read(workdir / CONFIG)
    if config is not None and not {"task", "data", "model"} <= config.keys():
        raise UsageError(f"{workdir / CONFIG} is of something else than a run; choose another --workdir")


def claim(workdir: epath.Path, config: dict[str, Any], data_hash: str, start: str, state: TrainState) -> None:
    """Writes down whose workdir it is, unless it holds checkpoints of another config or of other data.

    Args:
      workdir: locked by this process.
      config: the run's, as nested dictionaries.
      data_hash: of what the run reads; the config has its path alone.
      start: fingerprint of the parameters it starts from, kept from the first attempt; "" is random ones.
      state: abstract, for the size of a checkpoint.

    Raises:
      UsageError: the checkpoints are of another config, or of other data at the same path.
      BertjaxError: the disk is too full for two checkpoints.
    """
    # A run that failed before its first checkpoint has left nothing to protect from the command that puts it right.
    begun = has_begun(workdir)
    old = _read(workdir / CONFIG)
    shown = other_numbers(old, config) if begun and old is not None else ""
    if shown:
        raise UsageError(
            f"the workdir {workdir} belongs to a run with another config ({shown}); choose another "
            "--workdir, or go back to that config"
        )
    origin = {"sha256": data_hash, "started_from": start}
    before = (_read(workdir / DATA) if begun else None) or origin
    if before["sha256"] != data_hash:
        raise UsageError(
            f"the workdir {workdir} belongs to a run on other data: what its config names has changed since (see "
            f"{DATA}); choose another --workdir, or bring that data back"
        )
    size_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    check_free_space(workdir, 2 * size_bytes, "two checkpoints", "choose another --workdir")
    if jax.process_index() == 0:
        write_atomic(workdir / CONFIG, json.dumps(config, indent=1) + "\n")
        write_atomic(workdir / DATA, json.dumps(before) + "\n")


def started_from(workdir: epath.Path) -> str | None:
    """Fingerprint of the parameters the run of a workdir began with, "" where they were random; None without a run."""
    data = _read(workdir / DATA) if has_begun(workdir) else None
    return None if data is None else data.get("started_from", "")


def has_begun(workdir: epath.Path) -> bool:
    """Whether a run has left anything in a workdir that may not be lost: a checkpoint."""
    return any(folder.exists() and any(folder.iterdir()) for folder in (workdir / CHECKPOINTS, workdir / DAMAGED))


def other_numbers(old: dict[str, Any], new: dict[str, Any], of_best: bool = False) -> str:
    """The fields of two configs whose differences change what a run computes, in a line; "" where there are none.

    Args:
      old, new: as nested dictionaries.
      of_best: whether its numbers are those of its best evaluation, which how many there are decides, too.
    """
    # One of them may come from JSON, which has no tuples.
    old, new = (json.loads(json.dumps(config)) for config in (old, new))
    may_change = tuple(field for field in _MAY_CHANGE if not (of_best and field == "eval_every"))
    changed = [line for line in differences(old, new) if not line.startswith(may_change)]
    return "; ".join(changed[:_SHOWN_DIFFERENCES]) + ("; ..." if len(changed) > _SHOWN_DIFFERENCES else "")


def is_converted(workdir: Path | epath.Path) -> bool:
    """Whether a workdir is of a conversion, not of a run."""
    return (workdir / ORIGIN).exists()


def _read(file: epath.Path) -> dict[str, Any] | None:
    """A JSON file of the workdir, None if it is not there."""
    if not file.exists():
        return None
    try:
        return read_json_object(file)
    except ValueError as error:
        raise BertjaxError(f"{file} is damaged ({error}); choose another --workdir") from error


def keep_files(workdir: epath.Path, files: dict[str, bytes]) -> None:
    """Writes what a task wants kept beside its checkpoints."""
    if jax.process_index() == 0:
        for name, content in files.items():
            write_atomic(workdir / name, content)


@contextlib.contextmanager
def lock(workdir: epath.Path) -> Iterator[None]:
    """Keeps a second run out of a local workdir; a killed run's lock is gone with it.

    Raises:
      UsageError: another run holds it.
    """
    if is_remote(workdir) or jax.process_index() != 0:
        yield
        return
    path = os.fspath(workdir / _LOCK)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BertjaxError(f"cannot open {path}: {error.strerror}; if it is a link, remove it") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"another run is using the workdir {workdir}; wait for it or choose another") from None
        remove_temporaries(Path(os.fspath(workdir)))
        yield
    finally:
        os.close(file)


def take(workdir: epath.Path) -> Callable[[], None]:
    """Makes a claimed workdir at an address this run's, where nothing can be locked.

    The newest run has it. An older one, which may be what is left of a machine that was given up, ends before its next
    save, so that the two do not write into one checkpoint.

    Returns:
      Raises a BertjaxError when another run has taken the workdir since.
    """
    if not is_remote(workdir) or jax.process_index() != 0:
        return lambda: None
    ours = secrets.token_hex(16)
    write_atomic(workdir / _LOCK, ours)

    def check() -> None:
        try:
            found = (workdir / _LOCK).read_bytes().decode(errors="replace")
        except FileNotFoundError:
            found = ""
        if found != ours:
            raise BertjaxError(f"another run has begun in the workdir {workdir}, or emptied it; this one ends")

    return check
