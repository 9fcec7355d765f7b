"""Experiments: full and quick configs are valid, and docstrings document commands and arguments."""

import inspect
import re
import runpy
import shlex
from pathlib import Path

import pytest
from helpers.valid_commands import check_command

from bertjax.cli.main import parse_args
from bertjax.config.load import load_config
from bertjax.errors import UsageError
from bertjax.presets import named_grid
from bertjax.tasks.build import parse_config
from bertjax.training.checkpoint_config import fill_unset_fields

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "experiments").glob("*.py"))
every_experiment = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def tokens(config) -> int:
    phases = fill_unset_fields(parse_config(config)).resolved_phases
    return sum((phase.stop_step - phase.start_step) * phase.batch_size * phase.seq_len for phase in phases)


@every_experiment
def test_full_and_quick_configs_are_valid(file):
    full, quick = load_config(str(file), []), load_config(f"{file}:quick=true", [])
    configs = [fill_unset_fields(parse_config(config)) for config in (full, quick)]
    assert 0 < quick.steps <= 20
    if full.task in ("pretraining", "adaptation"):
        assert all(0 < config.optimizer.warmup(config.steps) < config.steps for config in configs)
        assert tokens(quick) <= tokens(full) / 100
    else:
        assert full.steps == 0 and full.epochs >= 1


@every_experiment
def test_docstring_lists_valid_commands_and_states_hardware_and_expected_result(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = inspect.cleandoc(runpy.run_path(str(file))["__doc__"])
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    assert lines and all(line.startswith(("bertjax ", "python demo/docstrings.py ")) for line in lines)
    commands = [shlex.split(line)[1:] for line in lines if line.startswith("bertjax ")]
    for arguments in commands:
        check_command(arguments)
    trained_configs = [args.config for args in map(parse_args, commands) if args.command == "train"]
    assert [config.partition(":")[0] for config in trained_configs] == [f"experiments/{file.name}"]
    for word in ("Hardware and time:", "Expected:"):
        assert word in text


@every_experiment
def test_arguments_are_documented_and_unknown_arguments_are_rejected(file):
    with pytest.raises(UsageError, match="unknown config argument 'nosuch'; use one of ") as error:
        load_config(f"{file}:nosuch=1", [])
    known = str(error.value).partition("use one of ")[2].partition(" (")[0].split(", ")
    assert {"size", "quick"} <= set(known)
    get_config = runpy.run_path(str(file))["get_config"]
    assert re.findall(r"(\w+)=", get_config.__doc__) == known


@pytest.mark.parametrize("name", ["text", "embed"])
def test_files_of_your_own_data_are_arguments(name):
    data = load_config(f"{name}:train=a.csv,dev=b.csv,test=c.csv", []).data
    assert (data.train_file, data.dev_file, data.test_file) == ("a.csv", "b.csv", "c.csv")


# Learning rates in 1e-5, batch sizes and epochs: section 4.1 and A.3 of the paper, README.md of google-research/bert.
@pytest.mark.parametrize(
    "name, rates, batches, epochs",
    [
        ("one", set(), set(), set()),
        ("glue", {5, 4, 3, 2}, set(), set()),
        ("a3", {5, 3, 2}, {16, 32}, {2, 3, 4}),
        ("small", {30, 10, 5, 3}, {8, 16, 32, 64, 128}, {4}),
    ],
)
def test_grids_have_the_trials_of_the_paper(name, rates, batches, epochs):
    grid = named_grid(name)
    assert {round(trial["optimizer.learning_rate"] * 1e5) for trial in grid if trial} == rates
    assert {trial["data.batch_size"] for trial in grid if "data.batch_size" in trial} == batches
    assert {trial["epochs"] for trial in grid if "epochs" in trial} == epochs
    trials = max(len(rates), 1) * max(len(batches), 1) * max(len(epochs), 1)
    assert len(grid) == trials == len({tuple(sorted(trial.items())) for trial in grid})
