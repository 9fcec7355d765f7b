"""How configs are read: files with typed arguments after the colon, overrides, and the `config.json` of a workdir."""

import contextlib
import functools
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from bertjax.errors import UsageError, first_line, shortened
from bertjax.utils.io import read_json


def parse_arguments(text: str | None, /, **defaults: Any) -> ConfigDict:
    """Arguments after the colon of `--config FILE:size=base,seq_len=128`, typed like their defaults.

    Args:
      text: `name=value` pairs with commas between them; a bare `name` sets a boolean. None or "" changes nothing.
      **defaults: every argument the experiment knows, with its default; the default's type is the argument's.

    Raises:
      UsageError: an unknown name (the known ones are listed), or a value of another type.
    """
    arguments, given = ConfigDict(defaults), set()
    for item in filter(None, (text or "").split(",")):
        name, has_value, value = item.partition("=")
        if name not in defaults:
            raise UsageError(
                f"unknown config argument {name!r}; known: {', '.join(defaults)}; a value with a comma in it goes in "
                "--config.FIELD=VALUE"
            )
        if name in given:
            raise UsageError(f"config argument {name} is given twice")
        given.add(name)
        kind = type(defaults[name])
        try:
            if kind is bool:
                arguments[name] = {"true": True, "1": True, "false": False, "0": False}[
                    value.lower() if has_value else "true"
                ]
            else:
                arguments[name] = kind(value)
        except (KeyError, ValueError):
            raise UsageError(f"config argument {name}={value!r} is not of type {kind.__name__}") from None
    return arguments


def load_config(config: str, overrides: Sequence[str]) -> ConfigDict:
    """Loads `FILE[:ARGUMENTS]` and applies `--config.FIELD=VALUE` overrides, by ml-collections' config flags.

    Raises:
      UsageError: no such file, an unknown field (the known ones beside it are listed), or a value of another type.
    """
    file, colon, arguments = config.partition(":")
    file = experiment_file(file)
    return _with_overrides(
        lambda values, argv: config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv),
        [f"--config={file}{colon}{arguments}", *overrides],
        file,
    )


def experiment_file(name: str) -> str:
    """The path of an experiment: of a file, or of one of those that come with the program, such as `pretrain`.

    Raises:
      UsageError: there is none.
    """
    if os.path.isfile(name):
        return name
    package = Path(__file__).parents[1]
    # Inside of an installed package, beside that of a repository.
    shipped = next(
        (folder for folder in (package / "experiments", package.parent / "experiments") if folder.is_dir()), None
    )
    files = shipped.rglob("[!_]*.py") if shipped else ()
    known = sorted(file.relative_to(shipped).with_suffix("").as_posix() for file in files)
    if name in known:
        return str(shipped / f"{name}.py")
    raise UsageError(f"no config file {name}; give one, or one of the experiments {', '.join(known)}")


def load_saved_config(file: os.PathLike, overrides: Sequence[str]) -> ConfigDict:
    """Reads the `config.json` of a workdir and applies overrides.

    Raises:
      UsageError: as `load_config`.
    """
    try:
        content = read_json(file)
        if not isinstance(content, dict) or not {"task", "data", "model"} <= content.keys():
            raise ValueError("it is no config")
        saved = ConfigDict(_with_tuples(content))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file} ({error}), which tells what the checkpoint is") from error
    return _with_overrides(
        lambda values, argv: config_flags.DEFINE_config_dict("config", saved, flag_values=values, sys_argv=argv),
        list(overrides),
        file,
    )


def _with_tuples(value: Any) -> Any:
    """What JSON made of a config: tuples came out as lists, which no override could change."""
    if isinstance(value, dict):
        return {name: _with_tuples(child) for name, child in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _with_overrides(define: Any, argv: list[str], file: Any) -> ConfigDict:
    program, settings = "bertjax", [item for item in argv if item.startswith("--config.")]
    _refuse_unknown_fields(
        _parsed(define, [program, *[item for item in argv[:1] if item not in settings]], file), settings
    )
    return _parsed(define, [program, *argv], file)


def _parsed(define: Any, argv: list[str], file: Any) -> ConfigDict:
    values = flags.FlagValues()
    holder = define(values, argv)
    try:
        with _no_bytecode_left():
            rest = values(argv)[1:]
            config = holder.value
    except UsageError:
        raise
    except SyntaxError as error:
        raise UsageError(f"the config file {file} is not valid Python: {error}") from error
    except SystemExit as error:
        raise UsageError(f"the config of {file} cannot be made: it ends the program") from error
    except AttributeError as error:
        if "no attribute 'get_config'" not in str(error):
            raise UsageError(f"the config of {file} cannot be made: {shortened(error)}") from error
        raise UsageError(f"{file} has no function get_config, which makes the config") from error
    except Exception as error:  # What a user's own `get_config` raises is anything.
        detail = shortened(error) or type(error).__name__
        raise UsageError(f"the config of {file} cannot be made: {detail}") from error
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; fields of the config are set with --config.FIELD=VALUE")
    if not isinstance(config, ConfigDict) or "task" not in config:
        raise UsageError(f"get_config of {file} must return a ConfigDict as those of bertjax/presets.py")
    return config


@contextlib.contextmanager
def _no_bytecode_left() -> Iterator[None]:
    """Python keeps what it made of a file beside it, and takes that again where time in seconds and size are the same.

    A config that is edited twice in a second would be the one before, and its folder is the user's.
    """
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _refuse_unknown_fields(config: ConfigDict, settings: list[str]) -> None:
    for item in settings:
        if item.startswith("--config.task="):
            task = item.partition("=")[2]
            raise UsageError(f"config.task={task!r}: the task is what an experiment is for; choose another experiment")
        names = item.removeprefix("--config.").partition("=")[0].split(".")
        node: Any = config
        for depth, name in enumerate(names):
            if not isinstance(node, ConfigDict) or name not in node:
                here = ".".join(["config", *names[:depth]])
                known = ", ".join(sorted(node)) if isinstance(node, ConfigDict) else "none, it is a value"
                raise UsageError(f"unknown field {'.'.join(names)!r}: {here} has no {name!r}; known: {known}")
            node = node[name]
        _refuse_another_type(node, item)


def _refuse_another_type(value: Any, item: str) -> None:
    """Raises a UsageError where what is given for a field is no value of its type."""
    given, text = item.partition("=")[::2]
    if isinstance(value, ConfigDict):
        raise UsageError(f"{given} is a section of fields; set one of them: {', '.join(sorted(value))}")
    kind = type(value)
    if kind not in (bool, int, float) or "=" not in item:
        return
    what = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
    try:
        fits = text.lower() in ("true", "false", "1", "0") if kind is bool else kind(text) is not None
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"{item}: it must be {what}")


def load_trials(
    config: str, named: Callable[[Callable[..., ConfigDict], str], list[dict[str, Any]] | None]
) -> list[dict[str, Any]]:
    """The trials of a sweep: what `sweep(arguments)` of the config's file yields, fields and their values.

    Args:
      config: `FILE[:ARGUMENTS]`.
      named: (the file's `get_config`, arguments) to the trials of a file without that function; None without any.

    Raises:
      UsageError: there are none, or `sweep` fails, or gives something else.
    """
    file, _, arguments = config.partition(":")
    file = experiment_file(file)
    try:
        experiment = runpy.run_path(file)
        sweep = experiment.get("sweep") or functools.partial(named, experiment["get_config"])
        found = sweep(arguments)
        if found is None and "sweep" not in experiment:
            raise UsageError(
                f"{file} has no argument grid and no function sweep(arguments); write one that yields dictionaries of "
                "fields and values, or give --grid FIELD=VALUE,VALUE"
            )
        trials = list(found) if isinstance(found, Iterable) else [found]
    except UsageError:
        raise
    except Exception as error:  # What a user's own `sweep` raises is anything.
        raise UsageError(f"sweep() of {file} cannot be run: {type(error).__name__}: {first_line(error)}") from error
    for trial in trials:
        if not isinstance(trial, dict) or not all(isinstance(field, str) for field in trial):
            raise UsageError(
                f"sweep() of {file} yields {shortened(repr(trial))}, which is no trial, a dictionary of fields "
                "and values such as {'optimizer.learning_rate': 1e-4}"
            )
    if not trials:
        raise UsageError(f"sweep() of {file} yields no trials")
    return trials


def grid_values(
    items: Sequence[str], overrides: Sequence[str], configure: Callable[[list[str]], ConfigDict]
) -> dict[str, list[Any]]:
    """The fields of a grid from the command line and their values, as the fields' own types.

    Args:
      items: `FIELD=VALUE,VALUE`. A comma always parts two values.
      overrides: what else the command line sets, which a grid may not set again.
      configure: overrides to the config that has them.

    Raises:
      UsageError: no such field or a value that is none of its type; a field or a value that is there twice.
    """
    values: dict[str, list[Any]] = {}
    for item in items:
        field, given, text = item.partition("=")
        if not given or not field or "" in (texts := text.split(",")):
            raise UsageError(
                f"--grid is {item[:80]!r}; give FIELD=VALUE,VALUE, such as optimizer.learning_rate=1e-4,3e-4 (a value "
                "cannot be empty nor have a comma in it)"
            )
        if field in values:
            raise UsageError(f"--grid has {field} twice; give all its values at once")
        if field == "seed":
            raise UsageError("--grid takes no seed; say with --seeds how many each setting is run with")
        if any(override.startswith(f"--config.{field}=") for override in overrides):
            raise UsageError(f"{field} is set by --grid and by --config.{field}; leave one of them out")
        values[field] = [_at(configure([f"--config.{field}={value}"]), field) for value in texts]
        twice = [text for index, text in enumerate(texts) if values[field][index] in values[field][:index]]
        if twice:
            raise UsageError(f"--grid has the value {twice[0]} of {field} twice")
    return values


def _at(config: ConfigDict, field: str) -> Any:
    for name in field.split("."):
        config = config[name]
    return config


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Each field in which two nested dictionaries differ, as `name: old value -> new value`."""
    found = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, "(absent)"), new.get(name, "(absent)")
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}: {str(before)[:60]} -> {str(after)[:60]}")
    return found
