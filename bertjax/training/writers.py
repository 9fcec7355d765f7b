"""Where a run's numbers go: `metrics.jsonl`, `timing.jsonl`, TensorBoard and the terminal.

`metrics.jsonl` holds what the computation gives and nothing that depends on the clock, so that a run that was killed
and resumed leaves the same lines as one that was not. Speeds are in `timing.jsonl`.
"""

import json
import math
import os
import sys
import time
from typing import Any

import jax
from etils import epath
from tqdm import tqdm

from bertjax.files import TABLE_BYTES, read_whole, write_whole
from bertjax.terminal import printable

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"


def say(text: str) -> None:
    """One line to the terminal, at once, from the first process of a run alone."""
    if jax.process_index() == 0:
        # Above the progress bars, where there are any.
        tqdm.write(printable(text), file=sys.stderr)
        sys.stderr.flush()


def read_lines(path: epath.Path) -> list[dict[str, Any]]:
    """The objects with a step in a JSON-lines file; what a kill or damage has made of a line is left out."""
    if not path.exists():
        return []
    lines = []
    for line in read_whole(path, TABLE_BYTES).decode(errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            lines.append(entry)
    return lines


class Writers:
    """Appends metrics and speeds; only process 0 of a run has one."""

    def __init__(self, workdir: epath.Path, step: int) -> None:
        """Opens the files of a run that goes on after `step`, dropping what an earlier attempt wrote beyond it."""
        # Not tf.summary: the loop runs where TensorFlow is not installed.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._workdir = workdir
        for name in (METRICS, TIMING):
            kept = [line for line in read_lines(workdir / name) if line["step"] <= step]
            write_whole(workdir / name, "".join(json.dumps(line) + "\n" for line in kept))
        self._tensorboard = EventFileWriter(os.fspath(workdir))

    def write(self, name: str, step: int, values: dict[str, float]) -> None:
        """One line of `metrics.jsonl` or `timing.jsonl`, on disk when this returns, and the same to TensorBoard."""
        line = json.dumps({"step": step, **{key: rounded(value) for key, value in values.items()}})
        with (self._workdir / name).open("a") as file:
            file.write(line + "\n")
        scalars = [self._summary.Value(tag=key, simple_value=value) for key, value in values.items()]
        self._tensorboard.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=scalars)))

    def close(self) -> None:
        self._tensorboard.close()


def rounded(value: float) -> float | int | str:
    """Seven digits, all a float32 has; JSON has no NaN."""
    if isinstance(value, int):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
