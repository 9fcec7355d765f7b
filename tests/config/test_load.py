"""Loading of configs: saved configs, and suggestions for unknown fields."""

import dataclasses
import json

import pytest

from bertjax.config.load import load_config, overridden_fields
from bertjax.errors import UsageError
from bertjax.training.checkpoint_config import experiment_config


@pytest.mark.parametrize(
    "field, remedy",
    [
        ("learning_rate", "did you mean optimizer.learning_rate?"),
        ("data.rate", "did you mean data.masking.rate?"),
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
