"""Tests of sweeps: resumption, failed trials, grids and damaged results."""

import json
import os
import re
import shutil
import signal

import pytest
from etils import epath
from helpers.command_runs import EXPERIMENTS, overrides
from helpers.commanding import refused

from bertjax.cli import main as cli
from bertjax.errors import BertjaxError
from bertjax.training import train as loop
from bertjax.training.results import read_results
from bertjax.training.step import make_train_step
from bertjax.training.sweep import trial_name
from bertjax.training.workdir import acquire_lock

INTACT_RESULTS = b'{"config": {"task": "glue", "data": {}, "model": {}}, "data_sha256": ""}'


@pytest.mark.parametrize(
    "content",
    [
        b'{"config": {"task": "glue"}, "data_sha256": ""}',
        INTACT_RESULTS[:-1] + b', "selected_by": "f1"}',
        b"\xff" + INTACT_RESULTS,
    ],
    ids=lambda content: str(content[:20]),
)
def test_damaged_results_file_is_an_error(tmp_path, content):
    (tmp_path / "results.json").write_bytes(INTACT_RESULTS)
    assert read_results(epath.Path(tmp_path))["data_sha256"] == ""
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(BertjaxError, match="cannot read .*results.json: .*; remove it and train again"):
        read_results(epath.Path(tmp_path), ("selected_by",) if b"selected_by" in content else ())


@pytest.mark.ci
def test_sweep_compiles_once_and_runs_only_failed_trials_again(cola, glue, letters, tmp_path, capfd, monkeypatch):
    config, field = f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},quick=true", "optimizer.learning_rate"
    command = ["sweep", config, f"--workdir={tmp_path}", f"--init_from={cola}"]
    command += ["--seeds=2", f"--grid={field}=1e-3,2e-3", *(x for x in overrides(None, steps=2) if field not in x)]
    calls = []
    train = loop.train

    def failing(task, path, init_from):
        calls.append(path)
        if len(calls) == 3:
            raise ZeroDivisionError("third trial")
        result = train(task, path, init_from)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(loop, "train", failing)
    make_train_step.cache_clear()
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert end.value.code == 42 and len(calls) == 1  # The signal arrives after the last step of the first trial.
    cli.main(command)
    first = json.loads((tmp_path / "sweep.json").read_text())
    assert len(calls) == 4 and sum("error" in trial for trial in first["trials"]) == 1
    assert {row["trials"] + row["failed"] for row in first["settings"]} == {2}
    assert len([*tmp_path.glob("trials/*/checkpoints")]) == 1
    (tmp_path / "notes.txt").write_text("user file")
    capfd.readouterr()
    cli.main(command)
    assert len(calls) == 5  # Only the failed trial runs again.
    second = json.loads((tmp_path / "sweep.json").read_text())
    assert not any("error" in trial for trial in second["trials"])
    # Trials of equal shapes compile once.
    assert len({trial["metrics"]["cross_entropy"] for trial in second["trials"]}) == 4
    assert make_train_step.cache_info().misses == 1
    assert second["best"]["score"] == max(trial["score"] for trial in second["trials"])
    assert "accuracy on dev" in capfd.readouterr().err
    # Finished trials with a different config are rejected. `eval_every` may change the best checkpoint, unlike
    # `checkpoint_every`.
    error = refused(capfd, *command, "--config.eval_every=1")
    assert re.search(r"is a different run: eval_every: \d+ -> 1", error)
    cli.main([*command, "--config.checkpoint_every=1"])
    # Finished trials that were trained on different data are rejected, even if they are not the first trial.
    other = tmp_path / "trials" / ".other"
    shutil.copytree(glue, other)
    dev = other / "RTE" / "dev.tsv"
    dev.write_text("".join(dev.read_text().splitlines(keepends=True)[:-1]))
    other_data = [item.replace(f"path={glue}", f"path={other}") for item in command]
    first_trial = tmp_path / "trials" / trial_name(second["trials"][0]["trial"])
    assert "was trained on different data; choose another --workdir" in refused(capfd, *other_data)
    first_trial.rename(first_trial.with_name(".first"))
    assert "was trained on different data; choose another --workdir" in refused(capfd, *other_data)
    first_trial.with_name(".first").rename(first_trial)
    [best] = (path.parent for path in tmp_path.glob("trials/*/checkpoints"))
    without = [*(item for item in command if item != f"--init_from={cola}"), f"--config.data.vocabulary={letters}"]
    assert "is a different run: it started from parameters that differ" in refused(capfd, *without)
    # Unfinished trials with a different initialization are also rejected.
    half = tmp_path / "trials" / ".half"
    shutil.copytree(best, half / "trials" / best.name)
    (half / "trials" / best.name / "results.json").unlink()
    without[without.index(f"--workdir={tmp_path}")] = f"--workdir={half}"
    assert "started from parameters that differ from those of --init_from" in refused(capfd, *without)


def test_locked_workdir_is_rejected(cola, glue, tmp_path, capfd):
    command = ["sweep", f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},quick=true", f"--workdir={tmp_path}"]
    with acquire_lock(tmp_path):
        assert f"another run is using the workdir {tmp_path}" in refused(capfd, *command, f"--init_from={cola}")
    assert not (tmp_path / "trials").exists()


@pytest.fixture
def seen_trials(monkeypatch):
    """Replaces the execution of trials. Returns a list to which a sweep adds the fields and config of each trial."""
    trials = []

    def record(new_trials, *arguments):
        trials.extend((trial.fields, trial.config) for trial in new_trials)
        return {"stopped": False}

    monkeypatch.setattr("bertjax.training.sweep._run_trials", record)
    return trials


def test_grid_flags_give_the_cross_product_of_typed_values(glue, letters, tmp_path, capfd, monkeypatch, seen_trials):
    config = f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},size=L1_H16,quick=true"
    command = ["sweep", config, f"--workdir={tmp_path}", f"--config.data.vocabulary={letters}"]
    grid = ["--grid=optimizer.learning_rate=1e-4,3e-4", "--grid", "data.batch_size=16,32", "--grid=model.remat=full"]
    cli.main([*command, "--seeds=2", "--config.seed", "5", *grid])
    assert [trial for trial, _ in seen_trials] == [
        {"optimizer.learning_rate": rate, "data.batch_size": rows, "model.remat": "full", "seed": seed}
        for rate in (1e-4, 3e-4)
        for rows in (16, 32)
        for seed in (5, 6)
    ]
    for trial, config in seen_trials:
        assert (config.optimizer.learning_rate, config.data.batch_size) == (*trial.values(),)[:2]
        assert (config.model.remat, config.seed) == (*trial.values(),)[2:]

    for invalid, message in (
        ("optimizer.learning_rate=1e-4,0.0001", "lists a value twice"),
        ("optimizer.learning_rate=1e-4,", "may contain a comma"),
        ("data.batch_size=8", "another --grid sets data.batch_size"),
        ("seed=1,2", "set the number of seeds with --seeds"),
        ("data.vocabulary=a", "--config.data.vocabulary sets the same field"),
    ):
        error = refused(capfd, *command, "--grid=data.batch_size=16", f"--grid={invalid}")
        assert re.search(message, error), error
    assert len(seen_trials) == 8
    # An invalid value is rejected before any trial starts.
    monkeypatch.undo()
    assert "config.steps is -1" in refused(capfd, *command, "--grid=steps=4,-1")
    assert not [*tmp_path.iterdir()]


def test_command_line_overrides_replace_grid_fields(glue, letters, tmp_path, seen_trials):
    config = f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},size=L1_H16,grid=a3"
    fixed = ["--config.epochs=7", "--config.optimizer.learning_rate=1e-3", f"--config.data.vocabulary={letters}"]
    cli.main(["sweep", config, f"--workdir={tmp_path}", *fixed])
    assert [trial for trial, _ in seen_trials] == [{"data.batch_size": rows, "seed": 0} for rows in (16, 32)]
    assert {(settings.epochs, settings.optimizer.learning_rate) for _, settings in seen_trials} == {(7, 1e-3)}


def test_trial_name_is_a_valid_folder_name():
    assert trial_name({"optimizer.learning_rate": 3e-05, "seed": 1}) == "optimizer.learning_rate=3e-05,seed=1"
    assert not {"/", "["} & {*trial_name({"data.vocabulary": "a/b[1]/vocab.txt"})}
