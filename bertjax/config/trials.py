"""Trials of a sweep, defined by the function `sweep()` of an experiment or by `--grid`."""

import runpy
from collections.abc import Callable, Sequence
from typing import Any

from ml_collections import ConfigDict

from bertjax.config.load import experiment_file
from bertjax.errors import UsageError, shortened

# Values of config fields in one trial, by field.
Trial = dict[str, Any]


def load_trials(
    config: str, grid_trials: Callable[[Callable[..., ConfigDict], str], list[Trial] | None]
) -> list[Trial]:
    """Returns the trials of an experiment's `sweep(arguments)` or of its argument `grid`.

    Args:
      config: `FILE[:ARGUMENTS]`.
      grid_trials: function from `get_config` and the arguments of an experiment without `sweep()` to trials or None.
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
                "values, or give --grid FIELD=VALUE,VALUE"
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
      items: values `FIELD=VALUE,VALUE` of the `--grid` options.
      overrides: `--config.FIELD=VALUE` flags, which must not set a field of the grid.
      load: function that returns the config with the given overrides.
    """
    grid: dict[str, list[Any]] = {}
    for item in items:
        field, has_values, text = item.partition("=")
        texts = text.split(",")
        if not field or not has_values or "" in texts:
            raise UsageError(
                f"invalid --grid: {item[:80]!r}; give FIELD=VALUE,VALUE, such as optimizer.learning_rate=1e-4,3e-4 "
                "(a value cannot be empty or contain a comma)"
            )
        if field in grid:
            raise UsageError(f"--grid sets {field} twice; give all its values in one option")
        if field == "seed":
            raise UsageError("--grid cannot set seed; give the number of seeds with --seeds")
        if any(override.startswith(f"--config.{field}=") for override in overrides):
            raise UsageError(f"--grid and --config.{field} both set {field}; omit one of them")
        grid[field] = [_value(load([f"--config.{field}={value}"]), field) for value in texts]
        for index, value in enumerate(texts):
            if grid[field][index] in grid[field][:index]:
                raise UsageError(f"--grid has the value {value} of {field} twice; give it once")
    return grid


def _value(config_dict: ConfigDict, field: str) -> Any:
    for name in field.split("."):
        config_dict = config_dict[name]
    return config_dict
