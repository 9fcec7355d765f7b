"""Loading of configs: experiment files with typed arguments, overrides, and the `config.json` of a workdir."""

import difflib
import os
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bertjax.config.fields import parse_value
from bertjax.errors import UsageError, first_line
from bertjax.utils.io import read_json_object

# Minimum `difflib` similarity of a field name that an error message suggests.
_MIN_SIMILARITY = 0.75


def parse_arguments(text: str | None, /, **defaults: Any) -> ConfigDict:
    """Parses the arguments after the colon of `--config FILE:size=base,seq_len=128`.

    Values are converted to the types of the defaults. A boolean argument without a value is set to true.
    """
    arguments = ConfigDict(defaults)
    for item in filter(None, (text or "").split(",")):
        name = item.partition("=")[0]
        if name not in defaults:
            fix = f"use one of {', '.join(defaults)} (for a value with a comma, --config.FIELD=VALUE)"
            raise UsageError(f"unknown config argument {name!r}; {fix}")
        arguments[name] = parse_value(type(defaults[name]), item)
    return arguments


def run_experiment(config: str) -> tuple[dict[str, Any], str]:
    """Runs an experiment file. Returns the file's variables, and the arguments for its functions.

    `config` is a value of `--config`, as `NAME[:ARGUMENTS]` or `FILE[:ARGUMENTS]`.
    """
    name, _, arguments = config.partition(":")
    return runpy.run_path(experiment_file(name)), arguments


def load_config(config: str, overrides: Sequence[str]) -> ConfigDict:
    """Loads the config of an experiment or of a workdir, and applies `--config.FIELD=VALUE` overrides.

    `config` is an experiment, see `run_experiment`, or the path of a workdir's `config.json`.
    """
    if config.partition(":")[0].endswith(".json"):
        return apply_overrides(load_saved_config(Path(config).expanduser()), overrides)
    experiment, arguments = run_experiment(config)
    file, get_config = experiment["__file__"], experiment.get("get_config")
    config_dict = get_config and (get_config(arguments) if arguments else get_config())
    if not isinstance(config_dict, ConfigDict) or "task" not in config_dict:
        raise UsageError(f"{file} needs a function get_config that returns a ConfigDict; see bertjax/presets.py")
    return apply_overrides(config_dict, overrides)


def experiments_folder() -> Path:
    """Returns the folder of the packaged experiments, which is next to the package in a clone, otherwise inside it."""
    package = Path(__file__).parents[1]
    folder = package / "experiments"
    return folder if folder.is_dir() else package.parent / "experiments"


def experiment_file(name: str) -> str:
    """Returns the path of a config file, or of a packaged experiment such as `pretrain`."""
    if os.path.isfile(name):
        return name
    folder = experiments_folder()
    if os.path.isfile(folder / f"{name}.py"):
        return str(folder / f"{name}.py")
    known = sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("[!_]*.py"))
    raise UsageError(f"config file not found: {name}; use a file or one of the experiments {', '.join(known)}")


def load_saved_config(file: os.PathLike, fix: str = "use the config.json of a workdir") -> ConfigDict:
    """Reads the `config.json` of a workdir. Raises a UsageError that ends with `fix` if this fails."""
    try:
        values = read_json_object(file)
        if not {"task", "data", "model"} <= values.keys():
            raise ValueError("it lacks task, data or model")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the config {file}: {first_line(error)}; {fix}") from error
    return ConfigDict(_with_tuples(values))


def _with_tuples(value: Any) -> Any:
    # JSON stores tuples as lists. Convert them back, because ConfigDict flags cannot override lists.
    if isinstance(value, dict):
        return {name: _with_tuples(child) for name, child in value.items()}
    return tuple(value) if isinstance(value, list) else value


def overridden_fields(overrides: Sequence[str]) -> set[str]:
    """Returns the paths of the fields that `--config.FIELD=VALUE` flags set, such as `data.seq_len`."""
    return {item.partition("=")[0].removeprefix("--config.") for item in overrides}


def apply_overrides(config_dict: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """Applies `--config.FIELD=VALUE` flags to a config in place. Repeated flags for a list field extend the list."""
    lists: set[str] = set()
    for item in overrides:
        if not item.startswith("--config."):
            raise UsageError(f"unexpected override {item!r}; write --config.FIELD=VALUE")
        path = item.removeprefix("--config.").partition("=")[0]
        if path == "task":
            raise UsageError(f"{item} cannot be overridden; set --config to an experiment of that task")
        section, name = _find_field(config_dict, path)
        value = parse_value(section.get_type(name), item)
        section[name] = (*section[name], *value) if path in lists else value
        lists |= {path} if isinstance(value, tuple) else set()
    return config_dict


def _find_field(config_dict: ConfigDict, path: str) -> tuple[ConfigDict, str]:
    """Returns the section and the name of a field. Raises a UsageError if the field does not exist."""
    section, name = config_dict, path.rpartition(".")[2]
    for part in path.split("."):
        section = section[part] if isinstance(section.get(part), ConfigDict) else section
    # Compare only the last part of each path, because all paths of a section start with the section's name.
    names = {each: each.rpartition(".")[2] for each in flatten_dict(config_dict.to_dict(), sep=".")}
    if path in names:
        return section, name
    is_section = any(each.startswith(f"{path}.") for each in names)
    closest = [] if is_section else difflib.get_close_matches(name, names.values(), n=1, cutoff=_MIN_SIMILARITY)
    similar = [each for each in names if names[each] in closest]
    fix = f"did you mean {' or '.join(similar)}?" if similar else f"use one of {', '.join(sorted(section))}"
    raise UsageError(f"unknown field {path!r}; {fix}")
