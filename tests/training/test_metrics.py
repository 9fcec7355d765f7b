"""TensorBoard shows what `metrics.jsonl` has, whatever became of the attempts before."""

import json
import subprocess
import sys

from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bertjax.training.metrics import METRICS, TIMING, JsonlWriter, TensorBoardWriter


def shown(workdir) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: steps and values by tag."""
    events = EventAccumulator(str(workdir)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def written(workdir) -> dict[str, list[tuple[int, float]]]:
    """The same of the JSON lines."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in (METRICS, TIMING):
        for line in map(json.loads, (workdir / name).read_text().splitlines()):
            for tag in line.keys() - {"step"}:
                found.setdefault(tag, []).append((line["step"], line[tag]))
    return found


def test_after_kills_each_step_is_shown_once_with_the_value_that_counts(tmp_path):
    killed = []
    for attempt, resumed_after, steps in ((1, -1, (0, 1, 2, 3)), (2, -1, (0, 1, 2, 3, 4)), (3, 2, (3, 4, 5))):
        workdir = epath.Path(tmp_path)
        board = TensorBoardWriter(workdir, resumed_after)
        metrics, timing = (JsonlWriter(workdir / name, resumed_after) for name in (METRICS, TIMING))
        for step in steps:
            # Halves, which single precision holds as they are.
            lines = [(metrics, {"loss": attempt + step / 2}), (timing, {"tokens_per_second": attempt * 100.0})]
            if step == 3:
                lines.append((metrics, {"eval_loss": attempt + 0.5}))
            for jsonl, values in lines:
                jsonl.write(step, values)
                board.write(step, values)
        # Not closed: a kill leaves no time for that.
        killed.append(board)
        assert shown(tmp_path) == written(tmp_path)
    assert written(tmp_path)["loss"] == [(0, 2.0), (1, 2.5), (2, 3.0), (3, 4.5), (4, 5.0), (5, 5.5)]
    for board in killed:
        board.close()


def test_files_on_a_disk_need_no_tensorflow(tmp_path):
    program = f"""
import sys
from etils import epath
from bertjax.training.metrics import TensorBoardWriter
TensorBoardWriter(epath.Path({str(tmp_path)!r}), -1).close()
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert len([*tmp_path.glob("events.out.tfevents.*")]) == 1
