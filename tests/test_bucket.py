"""Workdirs on object storage, which lacks renaming, appending and locks, behave like local workdirs."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from helpers import bucket
from helpers.commanding import failure, printed
from helpers.orbax_files import checkpoint_arrays
from helpers.processes import environment_of, train_command
from helpers.tiny_table import write_table

from bertjax.errors import BertjaxError, UsageError
from bertjax.model.config import ModelConfig
from bertjax.model.models import EncoderModel
from bertjax.training import workdir
from bertjax.training.checkpoint import Checkpoints, is_complete, resolve_checkpoint_path
from bertjax.training.checkpoint_metadata import model_metadata
from bertjax.training.metrics import JsonlWriter, read_lines
from bertjax.training.step import TrainState

ROOT = Path(__file__).parents[1]
RUN = "gs://bucket/runs/a"


@pytest.fixture
def stored(monkeypatch):
    """Yields object storage that this process and its child processes use for `gs://` paths."""
    with bucket.serving() as (storage, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield storage


def train(corpus: Path, workdir: Path | str, *more: str) -> list[str]:
    schedule = ("--config.steps=40", "--config.log_every=5", "--config.eval_every=20", "--config.keep_checkpoints=2")
    return train_command(corpus, workdir, *schedule, *more)


def start_process(command: list[str]) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, start_new_session=True, env=environment_of(1))


def run_process(command: list[str], code: int = 0) -> str:
    """Returns the standard error of a command that exits with `code`."""
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment_of(1))
    assert process.returncode == code, process.stderr
    return process.stderr


def copied(storage: bucket.Storage, prefix: str, folder: Path) -> Path:
    """Copies the objects with a prefix to local files and returns their folder."""
    for name in storage.names(prefix):
        if not name.endswith("/"):
            file = folder / name.removeprefix(prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(storage.read(name))
    return folder


@pytest.mark.slow
def test_remote_run_equals_a_local_run_bitwise_after_a_kill_and_a_stop(corpus, stored, tmp_path):
    alone = tmp_path / "alone"
    run_process(train(corpus, alone))
    process = start_process(train(corpus, RUN))

    def kill_in_the_save_of_20(method: str, path: str) -> None:
        if "runs/a/checkpoints/20/params/" in path and "commit_success" in path:
            os.killpg(process.pid, signal.SIGKILL)
            raise ConnectionError

    stored.fault = kill_in_the_save_of_20
    assert process.wait(timeout=120) == -signal.SIGKILL
    stored.fault = lambda method, path: None
    assert stored.names("runs/a/checkpoints/20/params/")
    assert "runs/a/checkpoints/20/commit_success.txt" not in stored.names()

    # An incomplete checkpoint is not used.
    evaluate = [sys.executable, "-m", "bertjax", "evaluate", f"--checkpoint={RUN}"]
    assert f"evaluated checkpoint {RUN}/checkpoints/10\n" in run_process(evaluate)
    evaluate[-1] += "/checkpoints/20"
    assert "20 is incomplete" in run_process(evaluate, code=1)

    process = start_process(train(corpus, RUN))
    stderr = []
    for line in process.stderr:
        stderr.append(line)
        if "step 25/" in line:
            process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 42, "".join(stderr)
    assert any("resumed gs://bucket/runs/a at step 10" in line for line in stderr)
    assert '"stopped": true' in process.stdout.read()

    assert re.search(r"resumed gs://bucket/runs/a at step (2[5-9]|3\d)", run_process(train(corpus, RUN)))
    there = copied(stored, "runs/a/", tmp_path / "there")
    for name in ("metrics.jsonl", "results.json", "config.json", "data.json", "vocab.txt"):
        assert (there / name).read_bytes() == (alone / name).read_bytes(), name
    assert (there / "curves.png").stat().st_size and not [*there.glob(".*.unfinished")]
    # The two newest scheduled checkpoints are kept, but not the checkpoint saved at the stop.
    assert sorted(path.name for path in (there / "checkpoints").iterdir()) == ["30", "40"]
    assert checkpoint_arrays(there / "checkpoints" / "40") == checkpoint_arrays(alone / "checkpoints" / "40")

    # A damaged checkpoint is skipped.
    for name in stored.names("runs/a/checkpoints/40/params/"):
        stored.write("bucket", name, b"x" * len(stored.read(name)), {})
    stderr = run_process(train(corpus, RUN))
    assert "40 is damaged (" in stderr and "moved to gs://bucket/runs/a/damaged_checkpoints/40" in stderr
    again = copied(stored, "runs/a/", tmp_path / "again")
    assert (again / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()
    assert checkpoint_arrays(again / "checkpoints" / "40") == checkpoint_arrays(alone / "checkpoints" / "40")


def lines_of(capfd, *arguments: str) -> list[dict]:
    """Returns the JSON lines that a command prints."""
    return [json.loads(line) for line in printed(capfd, *arguments).splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_remote_checkpoint_supports_init_from_predict_and_convert(corpus, stored, tmp_path, capfd):
    [base] = lines_of(capfd, *train(corpus, "gs://bucket/base", "--config.steps=2", "--config.eval_every=2")[3:])
    assert base["checkpoint"] == "gs://bucket/base/checkpoints/2"
    names = {name.split("/")[1] for name in stored.names("base/")}
    assert {".lock", "curves.png", "data.json", "metrics.jsonl", "results.json", "vocabulary.json"} <= names
    assert stored.names("base/events.out.tfevents.") and not any("unfinished" in name for name in names)
    [held_out] = lines_of(capfd, "evaluate", "--checkpoint=gs://bucket/base")
    assert held_out["loss"] == pytest.approx(base["loss"], rel=1e-6)

    (tmp_path / "train.tsv").write_text("text\tlabel\n" + "bana\tgood\nkero\tbad\n" * 8)
    tuning = [
        *("train", f"--config={ROOT}/experiments/text.py:train={tmp_path}/train.tsv,quick=true"),
        *("--config.data.dev_share=0.25", "--config.steps=2", "--config.data.batch_size=8"),
        *("--workdir=gs://bucket/topic", "--init_from=gs://bucket/base"),
    ]
    [tuned] = lines_of(capfd, *tuning)
    metadata = json.loads(stored.read("base/checkpoints/2/meta/metadata"))
    assert json.loads(stored.read("topic/data.json"))["started_from"] == metadata["fingerprints"]["params"]
    assert json.loads(stored.read("topic/config.json"))["model"]["hidden_size"] == 16
    # Running the same command again does nothing.
    assert lines_of(capfd, *tuning) == [tuned]
    stdout = printed(capfd, "predict", "--checkpoint=gs://bucket/topic", "bana ro")
    assert stdout.startswith("bana ro\n")
    printed(capfd, "convert", "gs://bucket/topic", f"{tmp_path}/converted", "--format=huggingface")
    places = "gs://bucket/topic", f"{tmp_path}/converted"
    assert len({printed(capfd, "features", f"--checkpoint={place}", "bana ro") for place in places}) == 1


def state_of(step: int) -> TrainState:
    params, sums = {"w": jnp.full(8, float(step))}, {"loss": jnp.zeros(2)}
    return TrainState(step=jnp.int32(step), params=params, opt_state={}, sums=sums, bad_step=jnp.int32(-1))


@pytest.mark.slow
def test_save_retries_lost_connections_and_fails_without_permission(stored):
    place, lost = workdir.create(RUN), set()

    def lose_the_first(method: str, path: str) -> None:
        # tensorstore writes the first file, TensorFlow the second one.
        for name in ("checkpoints/1/params/ocdbt.process_0/manifest", "checkpoints/1/commit_success.txt"):
            if method == "POST" and name in path and name not in lost:
                lost.add(name)
                raise ConnectionError

    def forbid_two(method: str, path: str) -> None:
        if method == "POST" and "checkpoints/2/params/ocdbt.process_0/manifest" in path:
            raise bucket.Refusal(403, "nobody does not have storage.objects.create access")

    stored.fault = lose_the_first
    checkpoints = Checkpoints(place, 2, lambda _: model_metadata(EncoderModel(ModelConfig())))
    checkpoints.save(state_of(1))
    checkpoints.wait()
    assert len(lost) == 2 and is_complete(checkpoints.path(1))
    stored.fault = forbid_two
    with pytest.raises(
        BertjaxError, match=rf"storage.objects.create.* the last good checkpoint is {RUN}/checkpoints/1\. Free"
    ):
        checkpoints.save(state_of(2))
        checkpoints.wait()
    assert stored.names("runs/a/checkpoints/2/")
    assert not is_complete(checkpoints.path(2))
    stored.fault = lambda method, path: None
    checkpoints.close()
    # Wait until the threads of the failed save stop writing. In a real run, they end with the process.
    written = -1
    while written != stored.last_generation:
        written = stored.last_generation
        time.sleep(2)
    again = Checkpoints(place, 2, lambda _: model_metadata(EncoderModel(ModelConfig())))
    # Orbax deletes the unfinished checkpoint in a background thread.
    deadline = time.monotonic() + 60
    while stored.names("runs/a/checkpoints/2/"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    back = again.restore_latest(state_of(0), lambda: state_of(0))
    assert int(back.step) == 1 and back.params["w"].tolist() == [1.0] * 8
    again.close()


def test_second_run_takes_over_a_remote_workdir_and_the_first_run_ends(stored):
    place = workdir.create(RUN)
    first = workdir.take_ownership(place)
    first()
    workdir.take_ownership(place)()
    with pytest.raises(BertjaxError, match="another run has taken over or emptied the workdir gs://bucket/runs/a"):
        first()


def test_metric_lines_are_uploaded_by_flush(stored):
    place = workdir.create(RUN)
    writer = JsonlWriter(place / "metrics.jsonl", -1)
    for step in range(1, 21):
        writer.write(step, {"loss": 1.0})
    writer.flush()
    assert [line["step"] for line in read_lines(place / "metrics.jsonl")] == [*range(1, 21)]
    writer.flush()
    writer.write(21, {"loss": 1.0})
    writer.close()
    # Three uploads: the empty file, 20 lines, and 21 lines.
    uploads = [path for method, path in stored.requests if method == "PUT" and "name=runs/a/metrics.jsonl&" in path]
    assert len(uploads) == 3
    resumed = JsonlWriter(place / "metrics.jsonl", 20)
    resumed.close()
    assert len(read_lines(place / "metrics.jsonl")) == 20


@pytest.mark.ci
def test_missing_bucket_and_missing_permission_end_the_run(stored, capfd, corpus):
    code, error = failure(capfd, *train(corpus, "gs://nosuch/run")[3:])
    assert code == 1 and "the bucket of gs://nosuch/run does not exist; check its name, or create the bucket" in error
    with pytest.raises(UsageError, match="unsupported checkpoint path: s3://bucket/run; use a local path or gs://"):
        resolve_checkpoint_path("s3://bucket/run")

    def forbidden(method: str, path: str) -> None:
        if method == "POST":
            raise bucket.Refusal(403, "nobody does not have storage.objects.create access")

    stored.fault = forbidden
    # Use a subprocess: the destructor of a file object that cannot be written retries while it holds the GIL, which the
    # server's thread needs.
    process = subprocess.run(train(corpus, RUN), capture_output=True, text=True)
    assert process.returncode == 1 and "does not have storage.objects.create access" in process.stderr


@pytest.mark.slow
def test_remote_table_equals_a_local_table(corpus, stored, tmp_path, capfd):
    file = write_table(tmp_path, corpus)
    shown = []
    for results in (f"{tmp_path}/results", "gs://bucket/results"):
        printed(capfd, "reproduce", f"--config={file}", f"--results={results}")
        # Running the command again does nothing.
        again = printed(capfd, "reproduce", f"--config={file}", f"--results={results}")
        assert '"done": ["cola/first", "pretrain/first"]' in again
        shown.append(printed(capfd, "table", "5", f"--results={results}"))
    assert shown[0] == shown[1] and "Commands of the missing runs" not in shown[0]
    there = copied(stored, "results/", tmp_path / "there")
    for name in ("pretrain/first/metrics.jsonl", "pretrain/first/results.json"):
        assert (there / name).read_bytes() == (tmp_path / "results" / name).read_bytes(), name
    # Only the best of two trials keeps its checkpoints.
    assert len([*there.glob("cola/first/trials/*/checkpoints/*")]) == 1
