"""Building blocks of experiment files: default configs, typed arguments and the hyperparameter grids of the paper.

An experiment defines `get_config`, which changes values of a default config but adds no fields:

    @arguments(path="", size="", grid="a3", quick=False)
    def get_config(args):
        config = finetuning_config("swag", args.size)
        config.data.path = args.path
        return config
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from bertjax.config.fields import to_config_dict
from bertjax.config.load import parse_arguments
from bertjax.errors import UsageError
from bertjax.model.config import size_fields
from bertjax.tasks.build import config_class

# Attribute of a decorated `get_config` that stores its argument parser.
_PARSER = "parsed_arguments"


def arguments(**defaults: Any) -> Callable[[Callable[[ConfigDict], ConfigDict]], Callable[[str | None], ConfigDict]]:
    """Decorates `get_config(args)` to parse the text after the colon of `--config FILE:size=base` into `args`.

    If an argument is named `grid`, `bertjax sweep` runs the trials of `named_grid(args.grid)`.

    Args:
      **defaults: default of each argument, which also determines its type.
    """

    def decorate(get_config: Callable[[ConfigDict], ConfigDict]) -> Callable[[str | None], ConfigDict]:
        @functools.wraps(get_config)
        def parse_and_get_config(text: str | None = None) -> ConfigDict:
            return get_config(parse_arguments(text, **defaults))

        setattr(parse_and_get_config, _PARSER, lambda text: parse_arguments(text, **defaults))
        return parse_and_get_config

    return decorate


def pretraining_config(size: str = "base") -> ConfigDict:
    """Returns the default pre-training config for a model of a named size."""
    config = to_config_dict(config_class("pretraining")())
    config.model.update({**size_fields(size), "vocab_size": 0})
    return config


def adaptation_config(size: str = "") -> ConfigDict:
    """Returns the default config of continued pre-training. `size` has the same meaning as in `finetuning_config`."""
    return finetuning_config("adaptation", size)


def finetuning_config(task: str, size: str = "") -> ConfigDict:
    """Returns the default fine-tuning config of a task (section A.3 of the paper).

    Args:
      task: module of `bertjax.tasks`.
      size: size of a randomly initialized model (default: "", the architecture of the initial checkpoint).
    """
    config = to_config_dict(config_class(task)())
    if size:
        defaults = to_config_dict(config_class("pretraining")()).model
        config.model.update({**defaults, **size_fields(size), "vocab_size": 0})
    return config


def make_quick(config: ConfigDict, seq_len: int) -> None:
    """Reduces a fine-tuning config to a few steps, which take less than a minute on a CPU."""
    config.steps = 4
    config.log_every = 2
    config.data.batch_size = 8
    config.data.seq_len = seq_len


def named_grid(name: str) -> list[dict[str, Any]]:
    """Returns the trials of a named grid, each as a dict from config field to value.

    Args:
      name: `one` (a single trial without changes), `glue` (section 4.1), `a3` (section A.3) or `small` (the small
        models of google-research/bert).
    """
    learning_rates = {"glue": (5e-5, 4e-5, 3e-5, 2e-5), "a3": (5e-5, 3e-5, 2e-5), "small": (3e-4, 1e-4, 5e-5, 3e-5)}
    batch_sizes = {"a3": (16, 32), "small": (8, 16, 32, 64, 128)}
    epochs = {"a3": (2, 3, 4), "small": (4,)}
    if name == "one":
        return [{}]
    if name not in learning_rates:
        raise UsageError(f"unknown grid: {name}; use one of {', '.join(('one', *learning_rates))}")
    values = {
        "data.batch_size": batch_sizes.get(name),
        "optimizer.learning_rate": learning_rates[name],
        "epochs": epochs.get(name),
    }
    return cross_product({field: choices for field, choices in values.items() if choices})


def trials_of(get_config: Callable[..., ConfigDict], text: str) -> list[dict[str, Any]] | None:
    """Returns the trials selected by an experiment's argument `grid`. Returns None without this argument.

    Args:
      get_config: function of the experiment, with or without the decorator `arguments`.
      text: arguments after the colon of `--config`.
    """
    parse = getattr(get_config, _PARSER, None)
    args = parse(text) if parse else {}
    return named_grid(args["grid"]) if "grid" in args else None


def cross_product(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns all combinations of the fields' values."""
    return [dict(zip(values, trial, strict=True)) for trial in itertools.product(*values.values())]
