"""Loading of configs: experiment files with typed arguments, overrides, and the `config.json` of a workdir."""

import difflib
import os
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict, config_flags

from bertjax.config.fields import check_value_text
from bertjax.errors import UsageError
from bertjax.utils.io import read_json_object

# Minimum `difflib` similarity of a field name that an error message suggests.
_MIN_SIMILARITY = 0.75


def parse_arguments(text: str | None, /, **defaults: Any) -> ConfigDict:
    """Parses the arguments after the colon of `--config FILE:size=base,seq_len=128`.

    Values are converted to the types of the defaults. A boolean argument without a value is set to true.
    """
    arguments, names = ConfigDict(defaults), set()
    for item in filter(None, (text or "").split(",")):
        name, has_value, value = item.partition("=")
        if name not in defaults:
            raise UsageError(
                f"unknown config argument {name!r}; use one of {', '.join(defaults)} (to set a value that contains a "
                "comma, use --config.FIELD=VALUE)"
            )
        if name in names:
            raise UsageError(f"config argument {name} is set twice; set it once")
        names.add(name)
        value_type = type(defaults[name])
        try:
            if value_type is bool:
                booleans = {"true": True, "1": True, "false": False, "0": False}
                arguments[name] = booleans[value.lower() if has_value else "true"]
            elif not has_value:
                raise UsageError(f"config argument {name} has no value; write {name}=VALUE")
            else:
                arguments[name] = value_type(value)
        except (KeyError, ValueError):
            raise UsageError(
                f"config argument {name}={value!r} is invalid; it must be of type {value_type.__name__}"
            ) from None
    return arguments


def load_config(config: str, overrides: Sequence[str]) -> ConfigDict:
    """Loads the config of an experiment or of a workdir, and applies `--config.FIELD=VALUE` overrides.

    `config` is a value of `--config`: an experiment, as `NAME[:ARGUMENTS]` or `FILE[:ARGUMENTS]`, or the path of a
    workdir's `config.json`.
    """
    name, colon, arguments = config.partition(":")
    if name.endswith(".json"):
        if colon:
            raise UsageError(f"{name} takes no arguments: {arguments}; set fields with --config.FIELD=VALUE")
        return apply_overrides(load_saved_config(Path(name).expanduser()), overrides)
    file = experiment_file(name)
    get_config = runpy.run_path(file).get("get_config")
    if get_config is None:
        raise UsageError(f"{file} lacks the function get_config; define one that returns a ConfigDict")
    config_dict = get_config(arguments) if colon else get_config()
    if not isinstance(config_dict, ConfigDict) or "task" not in config_dict:
        raise UsageError(f"get_config of {file} must return a ConfigDict with a task; see bertjax/presets.py")
    return apply_overrides(config_dict, overrides)


def experiment_file(name: str) -> str:
    """Returns the path of a config file, or of a packaged experiment such as `pretrain`."""
    if os.path.isfile(name):
        return name
    package = Path(__file__).parents[1]
    # An installed package contains the experiments. In a checkout, they are in the folder next to the package.
    folder = package / "experiments"
    if not folder.is_dir():
        folder = package.parent / "experiments"
    if os.path.isfile(folder / f"{name}.py"):
        return str(folder / f"{name}.py")
    known = sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("[!_]*.py"))
    raise UsageError(f"config file not found: {name}; use a file or one of the experiments {', '.join(known)}")


def load_saved_config(file: os.PathLike) -> ConfigDict:
    """Reads the `config.json` of a workdir."""
    try:
        values = read_json_object(file)
        if not {"task", "data", "model"} <= values.keys():
            raise ValueError("it lacks task, data or model")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read the config {file}: {reason}; use the config.json of a workdir") from error
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
    """Returns a config with `--config.FIELD=VALUE` flags applied."""
    for item in overrides:
        if item.startswith("--config."):
            _check_override(config_dict, item)
    argv = ["bertjax", *overrides]
    values = flags.FlagValues()
    holder = config_flags.DEFINE_config_dict("config", config_dict, flag_values=values, sys_argv=argv)
    try:
        extra = values(argv)[1:]
    except (flags.Error, ValueError, TypeError) as error:
        raise UsageError(f"invalid override: {error}; use --config.FIELD=VALUE") from error
    if extra:
        raise UsageError(f"unexpected argument {extra[0]!r}; set config fields with --config.FIELD=VALUE")
    return holder.value


def _check_override(config_dict: ConfigDict, item: str) -> None:
    """Raises a UsageError if the field of an override is unknown or the value has the wrong type."""
    flag, has_value, text = item.partition("=")
    names = flag.removeprefix("--config.").split(".")
    if names == ["task"]:
        raise UsageError(f"config.task={text!r} cannot be overridden; set --config to an experiment of that task")
    node: Any = config_dict
    field_type: type = ConfigDict
    for depth, name in enumerate(names):
        if not isinstance(node, ConfigDict) or name not in node:
            section, field = ".".join(["config", *names[:depth]]), ".".join(names)
            similar = _similar_fields(config_dict, field)
            if not isinstance(node, ConfigDict):
                remedy = "it is a single value, so set it directly"
            elif similar:
                remedy = f"did you mean {' or '.join(similar)}?"
            else:
                remedy = f"use one of {', '.join(sorted(node))}"
            raise UsageError(f"unknown field {field!r}: {section} does not contain {name!r}; {remedy}")
        field_type, node = node.get_type(name), node[name]
    if isinstance(node, ConfigDict):
        raise UsageError(f"{flag} is a section, not a field; set one of its fields: {', '.join(sorted(node))}")
    if field_type in (bool, int, float) and has_value:
        check_value_text(field_type, flag, text)


def _similar_fields(config_dict: ConfigDict, field: str) -> list[str]:
    """Returns the paths of the fields whose name is most similar to the unknown `field`, or []."""
    # Compare only the last part of each path, because all paths of a section start with the section's name.
    names = {path: path.split(".")[-1] for path in flatten_dict(config_dict.to_dict(), sep=".")}
    closest = difflib.get_close_matches(field.split(".")[-1], names.values(), n=1, cutoff=_MIN_SIMILARITY)
    return [path for path, name in names.items() if name in closest]
