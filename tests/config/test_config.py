"""Config classes: conversion to and from ConfigDicts, checks of fields, overrides and saved configs."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from etils import epath
from ml_collections import ConfigDict

from bertjax.config.fields import from_config_dict, to_config_dict
from bertjax.config.load import apply_overrides, load_config, overridden_fields
from bertjax.config.run import PATH_FIELDS
from bertjax.errors import UsageError
from bertjax.model.config import Architecture
from bertjax.presets import finetuning_config, pretraining_config
from bertjax.tasks.build import TASKS, config_class, parse_config
from bertjax.training import checkpoint_config
from bertjax.training.checkpoint_config import experiment_config, fill_unset_fields
from bertjax.training.workdir import result_differences
from bertjax.utils.sections import Section, bounded


@dataclasses.dataclass(frozen=True)
class Part(Section):
    rate: float = 0.5
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Config(Part):
    first: int = bounded(1, at_most=10)
    second: int = 2
    is_on: bool = False
    section: Part = Part()


def test_config_survives_conversion_to_config_dict_and_back():
    config = Config(rate=0.25, first=7, section=Part(names=("a", "b")))
    config_dict = to_config_dict(config)
    assert from_config_dict(Config(), config_dict) == config
    config_dict.section.names = ["c"]
    config_dict.rate = 1
    changed = from_config_dict(Config(), config_dict)
    assert changed.section.names == ("c",) and type(changed.rate) is float


def test_missing_fields_get_their_defaults():
    config_dict = ConfigDict({"second": 3, "section": {"rate": 0.1}})
    assert from_config_dict(Config(), config_dict) == Config(second=3, section=Part(rate=0.1))


def test_config_comparison_treats_missing_fields_as_defaults():
    config = dataclasses.asdict(config_class("glue")())
    old = {name: value for name, value in config.items() if name != "label_smoothing"}
    old["optimizer"] = {name: value for name, value in config["optimizer"].items() if name != "layer_decay"}
    assert result_differences(old, config) == ""
    assert result_differences(old, config | {"label_smoothing": 0.1}) == "label_smoothing: 0.0 -> 0.1"
    other_devices = {**config, "data": {**config["data"], "eval_batch_size": 48}, "patience": 3}
    assert result_differences(config, other_devices) == ""
    assert result_differences(config, other_devices, of_best=True) == "patience: 0 -> 3"


def test_a_checkpoint_sets_only_unset_fields_of_the_architecture(monkeypatch):
    monkeypatch.setattr(checkpoint_config, "saved_architecture", lambda checkpoint: Architecture())
    base_checkpoint, config_dict = epath.Path("/runs/base/checkpoints/100"), finetuning_config("glue")
    assert fill_unset_fields(parse_config(config_dict), base_checkpoint).model.layer_norm_eps == 1e-12
    same = apply_overrides(config_dict, ["--config.model.hidden_size=768"])
    assert fill_unset_fields(parse_config(same), base_checkpoint).model.num_hidden_layers == 12
    other = apply_overrides(config_dict, ["--config.model.layer_norm_eps=0.0"])
    with pytest.raises(UsageError, match="layer_norm_eps=0.0 differs from layer_norm_eps=1e-12"):
        fill_unset_fields(parse_config(other), base_checkpoint)
    with pytest.raises(UsageError, match="hidden_size=128 differs"):
        fill_unset_fields(parse_config(pretraining_config("tiny")), base_checkpoint)
    assert fill_unset_fields(parse_config(pretraining_config()), base_checkpoint).model.hidden_size == 768


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("first", 11, "config.first is 11; it must be at most 10"),
        ("second", 1 << 31, "config.second is 2,147,483,648; it must be at most 2,147,483,647"),
        ("second", True, "config.second is True; it must be an integer"),
        ("is_on", 1, "config.is_on is 1; it must be true or false"),
        ("names", 3, "config.names is 3; it must be a list"),
        ("section", 5, "config.section is 5; it must be a dictionary of fields"),
        ("third", 3, "config contains unknown fields: third; use one of first, is_on, names, rate, second, section"),
    ],
)
def test_error_for_an_invalid_value_names_the_field(field, value, message):
    values = to_config_dict(Config()).to_dict() | {field: value}
    with pytest.raises(UsageError) as error:
        from_config_dict(Config(), ConfigDict(values))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(("steps", "expected"), [(9_999, "auto"), (10_000, "false")])
def test_auto_scan_layers_has_another_value_in_long_runs(steps, expected):
    config = dataclasses.replace(fill_unset_fields(parse_config(pretraining_config("tiny"))), steps=steps)
    assert config.model_config(100).scan_layers == expected


@pytest.mark.parametrize(("vocab_size", "rows"), [(50_368, 50_368), (50_280, 50_368), (52_280, 52_352)])
def test_added_pieces_do_not_pad_the_table_to_twice_its_size(vocab_size, rows):
    """A ModernBERT checkpoint with 50,280 tokens in 50,368 rows has this number of rows as its multiple."""
    config = experiment_config("pretrain:size=tiny", ["--config.model.pad_vocab_to_multiple_of=50368"])
    assert config.model_config(vocab_size).padded_vocab_size == rows


@pytest.mark.ci
def test_config_checks_do_not_initialize_a_backend():
    # Distributed processes have to connect before a backend starts, and the config says how they connect.
    script = """
from bertjax.tasks.build import parse_config
from bertjax.model.config import Architecture
from bertjax.presets import finetuning_config, pretraining_config
for config in (pretraining_config("tiny"), finetuning_config("glue", "tiny")):
    config.model.attention = "fused"
    config.data.update({"task": "cola"} if config.task == "glue" else {})
    parse_config(config)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("task", TASKS)
def test_path_fields_lists_every_path_field_of_a_task(task):
    """Tests that `PATH_FIELDS` lists every path field of a task; a run may resume with other values of these fields."""
    (data,) = (field for field in dataclasses.fields(config_class(task)) if field.name == "data")
    names = {field.name for field in dataclasses.fields(data.default)}
    paths = {name for name in names if name.endswith(("_file", "corpus")) or name in ("path", "vocabulary", "labels")}
    assert paths and {f"data.{name}" for name in paths} <= {*PATH_FIELDS}


@pytest.mark.parametrize(
    "field, remedy",
    [
        ("learning_rate", "did you mean optimizer.learning_rate?"),
        ("optimizer.lerning_rate", "did you mean optimizer.learning_rate?"),
        ("mesh.zzz", "use one of data, fsdp, tensor"),
        ("seed.zzz", "steps, task"),
    ],
)
def test_error_for_an_unknown_field_suggests_a_fix(field, remedy):
    with pytest.raises(UsageError) as error:
        load_config("pretrain:size=tiny", [f"--config.{field}=1"])
    assert str(error.value).startswith(f"unknown field '{field}'; ") and str(error.value).endswith(remedy)


def test_load_config_accepts_the_config_json_of_a_workdir(tmp_path):
    file = tmp_path / "config.json"
    config = experiment_config("pretrain:size=tiny", ["--config.seed=3"])
    file.write_text(json.dumps(dataclasses.asdict(config)))
    assert experiment_config(str(file), []) == config
    changed = experiment_config(str(file), ["--config.seed=4"])
    assert changed == dataclasses.replace(config, seed=4)
    file.write_text("{}")
    for path, problem in ((file, "lacks task, data or model"), (tmp_path / "none.json", "No such file")):
        with pytest.raises(UsageError, match=f"{path.name}: .*{problem}"):
            load_config(str(path), [])


def test_overrides_are_converted_to_the_types_of_their_fields():
    flags = ["steps=7", "optimizer.eps=1", "data.packing", "optimizer.freeze=pooler", "optimizer.freeze=encoder/a"]
    config = load_config("pretrain:size=tiny", [f"--config.{flag}" for flag in flags])
    assert (config.steps, repr(config.optimizer.eps), config.data.packing) == (7, "1.0", True)
    assert config.optimizer.freeze == ("pooler", "encoder/a")
    assert overridden_fields(["--config.data.seq_len=64", "--config.data.packing"]) == {"data.seq_len", "data.packing"}
