"""What the files of experiments are made with: defaults of every field, typed arguments, and the grids of the paper.

An experiment is a file with `get_config`, which changes values and adds no fields:

    @arguments(path="", size="", grid="a3", quick=False)
    def get_config(given):
        config = finetuning_config("swag", given.size)
        config.data.path = given.path
        return config
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from bertjax.config.fields import as_config
from bertjax.config.load import parse_arguments
from bertjax.errors import UsageError
from bertjax.model.architecture import size_fields
from bertjax.tasks.build import config_class

# Of an experiment's `get_config`: text after the colon to its typed arguments.
_PARSER = "parsed_arguments"


def arguments(**defaults: Any) -> Callable[[Callable[[ConfigDict], ConfigDict]], Callable[[str | None], ConfigDict]]:
    """Makes `get_config(given)` one of the text after the colon of `--config FILE:size=base,quick`.

    With an argument `grid`, `bertjax sweep` runs the trials of `named_grid`.

    Args:
      **defaults: every argument the experiment knows, with its default; the default's type is the argument's.
    """

    def decorate(get_config: Callable[[ConfigDict], ConfigDict]) -> Callable[[str | None], ConfigDict]:
        @functools.wraps(get_config)
        def of_text(text: str | None = None) -> ConfigDict:
            return get_config(parse_arguments(text, **defaults))

        setattr(of_text, _PARSER, lambda text: parse_arguments(text, **defaults))
        return of_text

    return decorate


def pretraining_config(size: str = "base") -> ConfigDict:
    """Defaults of every field of a pre-training run, with the model of a named size."""
    config = as_config(config_class("pretraining")())
    config.model.update({**size_fields(size), "vocab_size": 0})
    return config


def finetuning_config(task: str, size: str = "") -> ConfigDict:
    """Defaults of every field of a fine-tuning run (section A.3 of the paper).

    Args:
      task: a module of `bertjax.tasks`.
      size: of a model that starts from random parameters; "" is the architecture of the checkpoint it starts from.
    """
    config = as_config(config_class(task)())
    if size:
        usual = as_config(config_class("pretraining")()).model
        config.model.update({**usual, **size_fields(size), "vocab_size": 0})
    return config


def make_quick(config: ConfigDict, seq_len: int) -> None:
    """A few steps on short rows, to see a fine-tuning experiment run whole within a minute on CPU."""
    config.steps = 4
    config.log_every = 2
    config.data.batch_size = 8
    config.data.seq_len = seq_len
    config.model.dtype = "float32"


def named_grid(name: str) -> list[dict[str, Any]]:
    """The trials of a sweep, fields and their values.

    Args:
      name: `one` is the config as it is, for restarts with several seeds; `glue` the learning rates of section 4.1;
        `a3` the whole grid of section A.3; `small` that of google-research/bert's README for its small models.

    Raises:
      UsageError: there is no such grid.
    """
    rates = {"glue": (5e-5, 4e-5, 3e-5, 2e-5), "a3": (5e-5, 3e-5, 2e-5), "small": (3e-4, 1e-4, 5e-5, 3e-5)}
    batches, epochs = {"a3": (16, 32), "small": (8, 16, 32, 64, 128)}, {"a3": (2, 3, 4), "small": (4,)}
    if name == "one":
        return [{}]
    if name not in rates:
        raise UsageError(f"grid={name}; known: one, {', '.join(rates)}")
    values = {"data.batch_size": batches.get(name), "optimizer.learning_rate": rates[name], "epochs": epochs.get(name)}
    return cross_product({field: options for field, options in values.items() if options})


def trials_of(get_config: Callable[..., ConfigDict], text: str) -> list[dict[str, Any]] | None:
    """The trials that the argument `grid` of an experiment names; None where it has none.

    Args:
      get_config: of the experiment, made by `arguments` or not.
      text: after the colon.
    """
    parse = getattr(get_config, _PARSER, None)
    given = parse(text) if parse else {}
    return named_grid(given["grid"]) if "grid" in given else None


def cross_product(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All trials that take one value of each field."""
    return [dict(zip(values, trial, strict=True)) for trial in itertools.product(*values.values())]
