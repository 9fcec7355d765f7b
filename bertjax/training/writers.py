"""Where a run's numbers go: `metrics.jsonl`, `timing.jsonl` and TensorBoard.

`metrics.jsonl` holds what the computation gives and nothing that depends on the clock, so that a run that was killed
and resumed leaves the same lines as one that was not. Speeds are in `timing.jsonl`.
"""

import json
import math
import os
import time
from typing import Any

from etils import epath

from bertjax.files import TABLE_BYTES, read_whole, write_whole

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"


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

    Attributes:
      metric_lines: that `metrics.jsonl` has.
    """

    def __init__(self, workdir: epath.Path, step: int) -> None:
        """Opens the files of a run that goes on after `step`, dropping what an earlier attempt wrote beyond it."""
        # Not tf.summary: the loop runs where TensorFlow is not installed.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._workdir = workdir
        kept = {
            name: [line for line in read_lines(workdir / name) if line["step"] <= step] for name in (METRICS, TIMING)
        }
        for name, lines in kept.items():
            write_whole(workdir / name, "".join(json.dumps(line) + "\n" for line in lines))
        self.metric_lines = len(kept[METRICS])
        self._tensorboard = EventFileWriter(os.fspath(workdir))
        # TensorBoard drops what it has from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, name: str, step: int, values: dict[str, float]) -> None:
        """One line of `metrics.jsonl` or `timing.jsonl`, on disk when this returns, and the same to TensorBoard."""
        line = json.dumps({"step": step, **{key: rounded(value) for key, value in values.items()}})
        with (self._workdir / name).open("a") as file:
            file.write(line + "\n")
        self.metric_lines += name == METRICS
        scalars = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def _add(self, event: Any) -> None:
        self._tensorboard.add_event(event)
        self._tensorboard.flush()

    def close(self) -> None:
        self._tensorboard.close()


def rounded(value: float) -> float | int | str:
    """Seven digits, all a float32 has; JSON has no NaN."""
    if isinstance(value, int):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)
