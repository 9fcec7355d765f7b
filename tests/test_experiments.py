"""Every experiment: its config is valid in full and in small, and its docstring says how to run it."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from bertjax.cli.arguments import parser
from bertjax.config.load import load_config, load_trials
from bertjax.errors import UsageError
from bertjax.presets import named_grid, trials_of
from bertjax.tasks.build import parse_config

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "experiments").glob("*.py"))
every_experiment = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def docstrings(file: Path) -> tuple[str, str]:
    """Of the module, and of its `get_config`."""
    module = ast.parse(file.read_text())
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    return ast.get_docstring(module) or "", ast.get_docstring(functions["get_config"]) or ""


def tokens(config) -> int:
    phases = parse_config(config).phases
    return sum((phase.stop_step - phase.start_step) * phase.batch_size * phase.seq_len for phase in phases)


def test_there_are_experiments():
    assert {"pretrain", "pretrain_cpu", "demo"} <= {file.stem for file in FILES}


@every_experiment
def test_the_config_is_valid_in_full_and_quick_in_small(file):
    full, quick = load_config(str(file), []), load_config(f"{file}:quick=true", [])
    for config in (full, quick):
        parse_config(config)
    assert 0 < quick.steps <= 20
    if full.task == "pretraining":
        assert all(0 < config.optimizer.warmup_steps < config.steps for config in (full, quick))
        assert tokens(quick) <= tokens(full) / 100
    else:
        assert full.steps == 0 and full.epochs >= 2


@every_experiment
def test_the_docstring_has_commands_that_are_valid_hardware_and_expectation(file, monkeypatch):
    monkeypatch.chdir(ROOT)
    text, _ = docstrings(file)
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    assert lines and all(line.startswith("bertjax ") for line in lines)
    trained = []
    for line in lines:
        args, overrides = parser().parse_known_args(shlex.split(line)[1:])
        if args.command == "train":
            parse_config(load_config(args.config, overrides))
            trained.append(args.config.partition(":")[0])
        elif args.command == "sweep":
            assert load_trials(args.config, trials_of)
        elif args.command != "predict":
            assert overrides == []
    assert trained == [f"experiments/{file.name}"]
    for word in ("Hardware and time:", "Expected:"):
        assert word in text


@every_experiment
def test_an_unknown_argument_is_refused_and_the_known_ones_are_documented(file):
    with pytest.raises(UsageError, match="unknown config argument 'nosuch'; known: ") as refusal:
        load_config(f"{file}:nosuch=1", [])
    known = str(refusal.value).partition("known: ")[2].partition(";")[0].split(", ")
    assert {"size", "quick"} <= set(known)
    documented = re.findall(r"(\w+)=", docstrings(file)[1])
    assert documented == known


@every_experiment
def test_an_unknown_field_is_refused(file):
    with pytest.raises(UsageError, match=r"unknown field 'optimizer\.nosuch'"):
        load_config(str(file), ["--config.optimizer.nosuch=1"])


@pytest.mark.parametrize(
    "name, trials, batches, epochs", [("one", 1, 0, 0), ("glue", 4, 0, 0), ("a3", 18, 2, 3), ("small", 20, 5, 1)]
)
def test_grids_have_the_paper_s_trials(name, trials, batches, epochs):
    found = named_grid(name)
    assert len(found) == trials == len({tuple(sorted(trial.items())) for trial in found})
    for field, count in (("data.batch_size", batches), ("epochs", epochs)):
        assert len({trial[field] for trial in found if field in trial}) == count


def test_an_unknown_grid_is_refused():
    with pytest.raises(UsageError, match="grid=b4; known: one, glue, a3, small"):
        named_grid("b4")
