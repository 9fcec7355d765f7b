"""Writers of a run's metrics: JSON Lines, TensorBoard, and experiment trackers.

`metrics.jsonl` contains only values that do not depend on the clock. So a run that was killed and resumed writes the
same file as an uninterrupted run. Speeds are in `timing.jsonl`.
"""

import contextlib
import hashlib
import importlib
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from etils import epath

from bertjax.errors import UsageError
from bertjax.utils.io import is_remote, write_atomic

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
# Prefix of evaluation metrics in `metrics.jsonl`.
EVAL_PREFIX = "eval_"
# Minimum seconds between rewrites of a file in object storage, which cannot append to files.
_REWRITE_SECONDS = 60.0


def read_lines(path: epath.Path) -> list[dict[str, Any]]:
    """Reads the objects with a `step` from a JSON Lines file. Skips lines that a killed process left incomplete."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().decode(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            lines.append(entry)
    return lines


def have_hash(lines: Iterable[Mapping[str, Any]], sha256: str) -> bool:
    """Returns whether `sha256` (see `JsonlWriter.sha256`) is the hash of the first n lines, for any n."""
    digest = hashlib.sha256()
    hashes = {digest.hexdigest()}
    for line in lines:
        digest.update(f"{json.dumps(line)}\n".encode())
        hashes.add(digest.hexdigest())
    return sha256 in hashes


def evaluation_metrics(line: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the evaluation metrics of an object of `metrics.jsonl`, without their prefix."""
    return {name.removeprefix(EVAL_PREFIX): value for name, value in line.items() if name.startswith(EVAL_PREFIX)}


def group_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Returns a logged line's metrics, keyed by their tag in TensorBoard and trackers (`train/NAME` or `eval/NAME`).

    If the line contains evaluation metrics, omits all other values of the line.
    """
    evaluated = evaluation_metrics(values)
    group, shown = ("eval", evaluated) if evaluated else ("train", values)
    return {f"{group}/{name}": value for name, value in shown.items()}


class JsonlWriter:
    """Writer that appends a line per step to a JSON Lines file. In object storage, `flush` rewrites the file."""

    def __init__(self, path: epath.Path, step: int) -> None:
        """Opens a file for a run that starts or resumes after `step`, and removes the lines of later steps."""
        self._path, self._appends = path, not is_remote(path)
        self._lines = [json.dumps(line) + "\n" for line in read_lines(path) if line["step"] <= step]
        write_atomic(path, "".join(self._lines))
        self._digest = hashlib.sha256("".join(self._lines).encode())
        self._is_behind, self._flushed_at = False, time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, **{name: json_number(value) for name, value in values.items()}}) + "\n"
        self._digest.update(line.encode())
        if self._appends:
            with self._path.open("a") as file:
                file.write(line)
            return
        self._lines.append(line)
        self._is_behind = True
        if time.monotonic() - self._flushed_at > _REWRITE_SECONDS:
            self.flush()

    @property
    def sha256(self) -> str:
        """Hash of all lines."""
        return self._digest.hexdigest()

    def flush(self) -> None:
        if self._is_behind:
            write_atomic(self._path, "".join(self._lines))
        self._is_behind, self._flushed_at = False, time.monotonic()

    def close(self) -> None:
        self.flush()


class TensorBoardWriter:
    """Writer of scalars to a TensorBoard event file."""

    def __init__(self, workdir: epath.Path, step: int) -> None:
        """Opens a new event file for a run that resumes after `step`.

        Its START event makes TensorBoard discard the events of later steps in earlier files.
        """
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._is_remote = is_remote(workdir)
        # Add nanoseconds, because TensorBoard reads files in the order of their names.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        # Do not use TensorBoard's `EventFileWriter`, because it imports TensorFlow, which takes seconds.
        self._open_file = contextlib.ExitStack()
        self._records = RecordWriter(self._open_file.enter_context((workdir / name).open("wb")))
        self._add(file_version="brain.Event:2")
        self._add(step=step + 1, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START))
        self.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=self._summary(value=scalars))
        if not self._is_remote or time.monotonic() - self._flushed_at > _REWRITE_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._records.flush()
        self._flushed_at = time.monotonic()

    def close(self) -> None:
        # Ignore errors of remote storage here. `write` or `flush` has already raised the same error.
        with contextlib.suppress(*([Exception] if self._is_remote else [])):
            self._open_file.close()

    def _add(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


def import_tracker(name: str) -> ModuleType:
    """Imports the package of an experiment tracker. Raises a UsageError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"--tracker {name} needs the package {name}; pip install 'bertjax[{name}]'") from error


class TrackerWriter:
    """Metric writer for the experiment trackers `wandb` and `trackio`, whose packages have the same functions."""

    def __init__(self, name: str, workdir: epath.Path, config: Mapping[str, Any]) -> None:
        """Starts or resumes a run in the tracker `wandb` or `trackio`. The run is named after the workdir's path."""
        self._tracker: Any = import_tracker(name)
        run = os.fspath(workdir)
        # trackio finds the run to resume by name, Weights & Biases by an id without slashes.
        run_id = {"id": hashlib.sha256(run.encode()).hexdigest()[:16]} if name == "wandb" else {}
        self._tracker.init(project="bertjax", name=run, config=dict(config), resume="allow", **run_id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._tracker.log(dict(values), step=step)

    def flush(self) -> None:
        """Does nothing, because trackers upload in the background."""

    def close(self) -> None:
        self._tracker.finish()


def json_number(value: float) -> float | int | str:
    """Rounds to seven significant digits, the precision of float32. Returns NaN and infinity as strings."""
    if isinstance(value, int):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)
