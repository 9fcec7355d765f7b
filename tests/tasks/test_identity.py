"""Tests that an edited or missing file of a workdir is an error."""

import dataclasses
import json
import shutil

import pytest
from running import EXPERIMENTS, overrides

from bertjax.cli import main as cli
from bertjax.inference.inference_defaults import Habits
from bertjax.training.checkpoint_metadata import ANSWERS


def edit(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


EDITS = [
    ("config.json", lambda config: config["model"].update(hidden_act="relu"), "hidden_act: gelu_tanh -> relu"),
    ("config.json", lambda config: config["data"].update(seq_len=9), " -> 9"),
    ("output_layer.json", lambda layer: layer["labels"].reverse(), "labels: ['0', '1'] -> ['1', '0']"),
    ("vocabulary.json", lambda entry: entry.update(lower_case=False), "lower_case: True -> False"),
]


@pytest.fixture(params=EDITS, ids=["hidden_act", "seq_len", "labels", "lower_case"])
def edited(request, cola, tmp_path):
    """Returns a fine-tuned workdir with one edited file, the file's name, and the change."""
    workdir = tmp_path / "run"
    shutil.copytree(cola, workdir)
    name, change, shown = request.param
    edit(workdir / name, change)
    return workdir, name, shown


def test_what_decides_an_answer_is_sealed_and_is_what_a_checkpoint_tells_of_itself():
    assert {field.name for field in dataclasses.fields(Habits)} == {*ANSWERS, "texts"}


def failed(capfd, *arguments) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    assert end.value.code == 1
    return capfd.readouterr().err.splitlines()[-1]


def test_every_command_reports_an_edited_workdir_file(edited, glue, tmp_path, capfd):
    workdir, name, shown = edited
    config = f"--config={EXPERIMENTS}/glue.py:task=rte,path={glue},quick=true"
    for command in (
        ["evaluate", f"--checkpoint={workdir}"],
        ["predict", f"--checkpoint={workdir}", f"--output={tmp_path / 'out'}"],
        ["features", f"--checkpoint={workdir}", "a text"],
        ["convert", workdir, tmp_path / "converted"],
        ["train", config, f"--init_from={workdir}", f"--workdir={tmp_path / 'other'}", *overrides(None)],
    ):
        error = failed(capfd, *command)
        assert f"{workdir / name} has been changed since checkpoint {workdir}" in error and shown in error
    assert not any((tmp_path / made).exists() for made in ("out", "converted", "other"))


def test_missing_workdir_file_is_an_error(cola, tmp_path, capfd):
    shutil.copytree(cola, tmp_path / "run")
    (tmp_path / "run" / "output_layer.json").unlink()
    assert "output_layer.json" in failed(capfd, "evaluate", f"--checkpoint={tmp_path / 'run'}")
