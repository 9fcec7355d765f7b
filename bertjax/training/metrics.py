"""Where a run's numbers go: `metrics.jsonl`, `timing.jsonl` and TensorBoard.

`metrics.jsonl` holds what the computation gives and nothing that depends on the clock, so that a run that was killed
and resumed leaves the same lines as one that was not. Speeds are in `timing.jsonl`.
"""

import contextlib
import json
import math
import os
import socket
import time
from typing import Any

from etils import epath

from bertjax.utils.io import TABLE_BYTES, is_remote, read_whole, write_atomic

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
# Object storage knows no way to append: a file is written anew with each line, and may be once a second.
_ANEW_SECONDS = 60.0


def read_lines(path: epath.Path) -> list[dict[str, Any]]:
    """The objects with a step in a JSON-lines file; what a kill or damage has made of a line is left out."""
    if not path.exists():
        return []
    lines = []
    for line in read_whole(path, TABLE_BYTES).decode(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            lines.append(entry)
    return lines


class Writers:
    """Appends metrics and speeds; only process 0 of a run has one.

    On a disk a line is there when it is written. At an address all lines are there after `flush`, and some before.

    Attributes:
      metric_lines: that `metrics.jsonl` has.
    """

    def __init__(self, workdir: epath.Path, step: int) -> None:
        """Opens the files of a run that goes on after `step`, dropping what an earlier attempt wrote beyond it."""
        # Not tf.summary: the loop runs where TensorFlow is not installed.
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._workdir, self._by_lines = workdir, not is_remote(workdir)
        kept = {
            name: [json.dumps(line) + "\n" for line in read_lines(workdir / name) if line["step"] <= step]
            for name in (METRICS, TIMING)
        }
        for name, lines in kept.items():
            write_atomic(workdir / name, "".join(lines))
        self.metric_lines = len(kept[METRICS])
        # What cannot be appended to is kept to be written anew.
        self._kept = {} if self._by_lines else kept
        self._behind: set[str] = set()
        self._flushed = time.monotonic()
        self._tensorboard = _event_file(workdir)
        # TensorBoard drops what it has from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, name: str, step: int, values: dict[str, float]) -> None:
        """One line of `metrics.jsonl` or `timing.jsonl`, and the same to TensorBoard."""
        line = json.dumps({"step": step, **{key: rounded(value) for key, value in values.items()}}) + "\n"
        self.metric_lines += name == METRICS
        if self._by_lines:
            with (self._workdir / name).open("a") as file:
                file.write(line)
        else:
            self._kept[name].append(line)
            self._behind.add(name)
        scalars = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))
        if not self._by_lines and time.monotonic() - self._flushed > _ANEW_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Has all lines so far where the files are read."""
        for name in sorted(self._behind):
            write_atomic(self._workdir / name, "".join(self._kept[name]))
        if self._behind:
            self._tensorboard.flush()
        self._behind.clear()
        self._flushed = time.monotonic()

    def _add(self, event: Any) -> None:
        self._tensorboard.add_event(event)
        if self._by_lines:
            self._tensorboard.flush()

    def close(self) -> None:
        # Where storage fails, that has ended the run and is told already; what a run needs was flushed before.
        with contextlib.suppress(*([] if self._by_lines else [Exception])):
            self.flush()
            self._tensorboard.close()


def _event_file(workdir: epath.Path) -> Any:
    """Something with `add_event`, `flush` and `close`, for TensorBoard."""
    if is_remote(workdir):
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        return EventFileWriter(os.fspath(workdir))
    return _EventFile(workdir)


class _EventFile:
    """An event file on a disk; TensorBoard's own class imports TensorFlow for it, which takes seconds."""

    def __init__(self, workdir: epath.Path) -> None:
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        # TensorBoard reads files by the order of their names: two attempts may begin within one second.
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        name = f"events.out.tfevents.{seconds:010d}.{nanoseconds:09d}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter(open(workdir / name, "xb"))  # noqa: SIM115 - until `close`
        self.add_event(event_pb2.Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def add_event(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        self._records.flush()

    def close(self) -> None:
        self._records.close()


def rounded(value: float) -> float | int | str:
    """Seven digits, all a float32 has; JSON has no NaN."""
    if isinstance(value, int):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)
