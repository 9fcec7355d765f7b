"""Trials of a sweep, defined by the function `sweep()` of an experiment or by `--grid`."""

import runpy
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from bertjax.config.load import experiment_file
from bertjax.errors import UsageError, shortened

# Config fields of one trial: path -> value.
Trial = dict[str, Any]


def load_trials(
    config: str, grid_trials: Callable[[Callable[..., ConfigDict], str], list[Trial] | None]
) -> list[Trial]:
    """Returns the trials that an experiment defines with a function `sweep(arguments)` or an argument `grid`.

    Args:
      config: `FILE[:ARGUMENTS]`.
      grid_trials: function for experiments without `sweep()`. It returns the trials of the argument `grid`, or None if
        the experiment does not define this argument.
    """
    name, _, arguments = config.partition(":")
    file = experiment_file(name)
    experiment = runpy.run_path(file)
    if "sweep" in experiment:
        trials = experiment["sweep"](arguments)
    else:
        trials = grid_trials(experiment["get_config"], arguments)
        if trials is None:
            raise UsageError(
                f"{file} defines no trials; add a function sweep(arguments) that yields dictionaries of fields and "
                "values, or use --grid FIELD=VALUE,VALUE"
            )
    trials = list(trials)
    for trial in trials:
        if not isinstance(trial, dict) or not all(isinstance(field, str) for field in trial):
            raise UsageError(
                f"sweep() of {file} yields {shortened(repr(trial))}; yield dictionaries such as "
                "{'optimizer.learning_rate': 1e-4}"
            )
    if not trials:
        raise UsageError(f"sweep() of {file} yields no trials; yield at least one")
    return trials


def grid_values(
    items: Sequence[str], overrides: Sequence[str], load: Callable[[list[str]], ConfigDict]
) -> dict[str, list[Any]]:
    """Returns the fields of `--grid` and their values, converted to the types of the fields.

    Args:
      items: `FIELD=VALUE,VALUE` of each `--grid` option.
      overrides: `--config.FIELD=VALUE` flags, which must not set a field of the grid.
      load: function that returns the config with the given overrides.
    """
    grid: dict[str, list[Any]] = {}
    for item in items:
        field, has_values, text = item.partition("=")
        texts = text.split(",")
        if not field or not has_values or "" in texts:
            raise UsageError(
                f"invalid --grid: {item[:80]!r}; use FIELD=VALUE,VALUE, such as optimizer.learning_rate=1e-4,3e-4 "
                "(a value cannot be empty or contain a comma)"
            )
        if field in grid:
            raise UsageError(f"--grid sets {field} twice; list all its values in one option")
        if field == "seed":
            raise UsageError("--grid cannot set seed; set the number of seeds with --seeds")
        if any(override.startswith(f"--config.{field}=") for override in overrides):
            raise UsageError(f"--grid and --config.{field} both set {field}; omit one of them")
        grid[field] = [_value(load([f"--config.{field}={value}"]), field) for value in texts]
        for index, value in enumerate(texts):
            if grid[field][index] in grid[field][:index]:
                raise UsageError(f"--grid lists the value {value} of {field} twice; list it once")
    return grid


def _value(config_dict: ConfigDict, field: str) -> Any:
    for name in field.split("."):
        config_dict = config_dict[name]
    return config_dict
