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
        ("seed.nosuch", "config.seed does not contain 'nosuch'; it is a single value, so set it directly"),
    ],
)
def test_error_for_an_unknown_field_suggests_a_fix(field, remedy):
    with pytest.raises(UsageError) as error:
        load_config("pretrain:size=tiny", [f"--config.{field}=1"])
    assert str(error.value).startswith(f"unknown field '{field}': config") and str(error.value).endswith(remedy)


def test_load_config_accepts_the_config_json_of_a_workdir(tmp_path):
    file = tmp_path / "config.json"
    config = experiment_config("pretrain:size=tiny", ["--config.seed=3"])
    file.write_text(json.dumps(dataclasses.asdict(config)))
    assert experiment_config(str(file), []) == config
    changed = experiment_config(str(file), ["--config.seed=4"])
    assert changed == dataclasses.replace(config, seed=4)
    with pytest.raises(UsageError, match="config.json takes no arguments: size=base; set fields with --config.FIELD="):
        load_config(f"{file}:size=base", [])
    with pytest.raises(UsageError, match="none.json: No such file or directory; use the config.json of a workdir"):
        load_config(str(tmp_path / "none.json"), [])
    file.write_text("{}")
    with pytest.raises(UsageError, match="config.json: it lacks task, data or model; use the config.json"):
        load_config(str(file), [])


def test_a_flag_without_a_value_overrides_its_field():
    assert overridden_fields(["--config.data.seq_len=64", "--config.data.packing"]) == {"data.seq_len", "data.packing"}
