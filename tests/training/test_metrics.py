"""Writers of metrics: JSON Lines, TensorBoard and experiment trackers."""

import json
import subprocess
import sys
from unittest.mock import Mock, call

import pytest
from etils import epath
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bertjax.training.metrics import METRICS, TIMING, JsonlWriter, TensorBoardWriter, TrackerWriter, group_metrics


def tensorboard_scalars(workdir) -> dict[str, list[tuple[int, float]]]:
    """Returns the steps and values that TensorBoard shows, by tag."""
    events = EventAccumulator(str(workdir)).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def jsonl_scalars(workdir) -> dict[str, list[tuple[int, float]]]:
    """Returns the steps and values of the JSON Lines files, keyed by name."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    for name in (METRICS, TIMING):
        for line in map(json.loads, (workdir / name).read_text().splitlines()):
            for tag in line.keys() - {"step"}:
                scalars.setdefault(tag, []).append((line["step"], line[tag]))
    return scalars


def test_tensorboard_shows_each_step_once_after_kills(tmp_path):
    boards = []
    for attempt, resumed_after, steps in ((1, -1, (0, 1, 2, 3)), (2, -1, (0, 1, 2, 3, 4)), (3, 2, (3, 4, 5))):
        workdir = epath.Path(tmp_path)
        board = TensorBoardWriter(workdir, resumed_after)
        metrics, timing = (JsonlWriter(workdir / name, resumed_after) for name in (METRICS, TIMING))
        for step in steps:
            # Multiples of 0.5 are exact in float32.
            lines = [(metrics, {"loss": attempt + step / 2}), (timing, {"tokens_per_second": attempt * 100.0})]
            if step == 3:
                lines.append((metrics, {"eval_loss": attempt + 0.5}))
            for jsonl, values in lines:
                jsonl.write(step, values)
                board.write(step, values)
        # A killed run does not close its writer.
        boards.append(board)
        assert tensorboard_scalars(tmp_path) == jsonl_scalars(tmp_path)
    assert jsonl_scalars(tmp_path)["loss"] == [(0, 2.0), (1, 2.5), (2, 3.0), (3, 4.5), (4, 5.0), (5, 5.5)]
    for board in boards:
        board.close()


def test_metric_tags_are_grouped():
    assert group_metrics({"loss": 3.0, "tokens": 5}) == {"train/loss": 3.0, "train/tokens": 5}
    assert group_metrics({"eval_loss": 1.0, "eval_f1": 0.5, "tokens": 5}) == {"eval/loss": 1.0, "eval/f1": 0.5}


def test_writing_local_event_files_does_not_import_tensorflow(tmp_path):
    program = f"""
import sys
from etils import epath
from bertjax.training.metrics import TensorBoardWriter
TensorBoardWriter(epath.Path({str(tmp_path)!r}), -1).close()
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100)
    assert len([*tmp_path.glob("events.out.tfevents.*")]) == 1


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_tracker_receives_config_and_metrics_and_resumes_the_run_of_a_workdir(tmp_path, monkeypatch, name):
    tracker = Mock()
    monkeypatch.setitem(sys.modules, name, tracker)
    for workdir in ("a/run", "a/run", "b/run"):
        writer = TrackerWriter(name, epath.Path(tmp_path / workdir), {"seed": 3})
        writer.write(5, {"loss": 1.5})
        writer.close()
    assert tracker.mock_calls[1:3] == [call.log({"loss": 1.5}, step=5), call.finish()]
    first, resumed, other = (arguments.kwargs for arguments in tracker.init.call_args_list)
    assert (first["project"], first["config"], first["resume"]) == ("bertjax", {"seed": 3}, "allow")
    # Weights & Biases identifies a run by `id`, trackio by `name`.
    key = "id" if name == "wandb" else "name"
    assert first == resumed and first[key] != other[key]
