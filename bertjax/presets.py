"""Building blocks of experiment files: default configs, typed arguments, hyperparameter grids and settings of sweeps.

An experiment defines `get_config`, which changes values of a default config but adds no fields:

    @arguments(path="", size="", grid="a3", quick=False)
    def get_config(args):
        config = finetuning_config("swag", args.size)
        config.data.path = args.path
        return config
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from bertjax.config.fields import to_config_dict
from bertjax.config.load import overridden_fields, parse_arguments, run_experiment
from bertjax.errors import UsageError, shortened
from bertjax.model.config import UNSET_ARCHITECTURE, size_fields
from bertjax.tasks.build import config_class

# Setting of a sweep: config overrides, keyed by field path. A sweep trains each setting once per seed.
Setting = dict[str, Any]
# Attribute of a decorated `get_config` that stores its argument parser.
_PARSER = "parsed_arguments"


def arguments(**defaults: Any) -> Callable[[Callable[[ConfigDict], ConfigDict]], Callable[[str | None], ConfigDict]]:
    """Decorates `get_config(args)`, so that `args` contains the values after the colon in `--config FILE:size=base`.

    If an argument is named `grid`, `bertjax sweep` runs the settings of `named_grid(args.grid)`.

    Args:
      **defaults: default of each argument, which also determines its type.
    """

    parse = functools.partial(parse_arguments, **defaults)

    def decorate(get_config: Callable[[ConfigDict], ConfigDict]) -> Callable[[str | None], ConfigDict]:
        @functools.wraps(get_config)
        def parse_and_get_config(text: str | None = None) -> ConfigDict:
            return get_config(parse(text))

        setattr(parse_and_get_config, _PARSER, parse)
        return parse_and_get_config

    return decorate


def pretraining_config(size: str = "") -> ConfigDict:
    """Returns the default pre-training config for a model size, see `size_fields`.

    With `size=""`, the architecture is unset, so that an initial checkpoint may determine it.
    """
    return finetuning_config("pretraining", size)


def finetuning_config(task: str, size: str = "") -> ConfigDict:
    """Returns the default config of a task (section A.3 of the paper).

    Args:
      task: name of a task, see `bertjax/tasks/build.py`.
      size: size of a randomly initialized model (default: "", the architecture of the initial checkpoint).
    """
    fields: dict[str, Any] = {"model": dataclasses.replace(UNSET_ARCHITECTURE, **(size_fields(size) if size else {}))}
    return to_config_dict(dataclasses.replace(config_class(task)(), **fields))


def modernbert_config(
    size: str, shapes: Mapping[str, tuple[int, int, int]], architecture: Mapping[str, Any], quick: bool
) -> ConfigDict:
    """Returns a pre-training config with ModernBERT's architecture, row format, masking rate and optimizer.

    Args:
      size: a key of `shapes`, or a custom size such as `L4_H256`.
      shapes: number of layers, hidden size and feed-forward size of each size. The head size is 64.
      architecture: other model fields, from `bertjax.convert.modernbert`.
      quick: whether to use four layers of width 128 instead of a named size.
    """
    if size not in shapes and not size.startswith("L"):
        raise UsageError(f"unknown size={size}; use one of {', '.join(shapes)}, or a custom size such as L4_H256")
    layers, width, mlp_width = shapes.get(size, (0, 0, 0))
    form = f"L{layers}_H{width}" if layers else size
    config = pretraining_config("L4_H128" if quick and layers else form)
    config.model.update({**architecture, "model_type": "modernbert", "global_rope_theta": 10_000.0})
    config.model.intermediate_size = (0 if quick else mlp_width) or config.model.hidden_size * 3 // 2
    config.data.update({"objective": "none", "packing": True, "seq_len": 1024})
    config.data.masking.rate = 0.3
    config.optimizer.update({"name": "stable_adamw", "schedule": "warmup_stable_decay", "b2": 0.98, "clip_norm": 0.0})
    return config


def make_quick(config: ConfigDict, seq_len: int) -> None:
    """Reduces a config to a few steps, at least one per phase, which take less than a minute on a CPU."""
    config.steps = 4
    if phases := config.get("phases", ()):
        config.steps = config.eval_every = config.checkpoint_every = 2 * len(phases)
        config.optimizer.warmup_steps, config.data.eval_rows = 1, 64
        config.phases = tuple(
            {**each, "share": 1, "seq_len": each["seq_len"] // 16, "batch_size": 8} for each in phases
        )
    config.log_every = 2
    config.data.batch_size = 8
    config.data.seq_len = seq_len


def phase_of(tokens: float, batch_size: int, seq_len: int, **fields: Any) -> dict[str, Any]:
    """Returns a phase that trains on `tokens` tokens. `share` is its number of steps, because shares are relative."""
    return {"share": tokens / (batch_size * seq_len), "batch_size": batch_size, "seq_len": seq_len, **fields}


def named_grid(name: str) -> list[Setting]:
    """Returns the settings of a named grid.

    Args:
      name: `one` (a single setting without changes), `glue` (section 4.1), `a3` (section A.3) or `small` (the small
        models of google-research/bert).
    """
    batch_size, rate = "data.batch_size", "optimizer.learning_rate"
    grids: dict[str, dict[str, Sequence[Any]]] = {
        "one": {},
        "glue": {rate: (5e-5, 4e-5, 3e-5, 2e-5)},
        "a3": {batch_size: (16, 32), rate: (5e-5, 3e-5, 2e-5), "epochs": (2, 3, 4)},
        "small": {batch_size: (8, 16, 32, 64, 128), rate: (3e-4, 1e-4, 5e-5, 3e-5), "epochs": (4,)},
    }
    if name not in grids:
        raise UsageError(f"unknown grid: {name}; the named grids are {', '.join(grids)}")
    return cross_product(grids[name])


def load_settings(config: str) -> list[Setting]:
    """Returns the settings of a sweep for the experiment `FILE[:ARGUMENTS]`.

    They are the results of the experiment's function `sweep(arguments)` or, if it has none, the grid that its argument
    `grid` names.
    """
    experiment, arguments = run_experiment(config)
    if "sweep" in experiment:
        settings = list(experiment["sweep"](arguments))
        if not settings or not all(isinstance(setting, dict) for setting in settings):
            advice = "yield dictionaries such as {'optimizer.learning_rate': 1e-4}"
            raise UsageError(f"sweep() of {config} yields {shortened(settings)}; {advice}")
        return settings
    args = getattr(experiment.get("get_config"), _PARSER, parse_arguments)(arguments)
    if "grid" not in args:
        raise UsageError(f"{config} defines no settings; use --grid FIELD=VALUE,VALUE, or define sweep(arguments)")
    return named_grid(args["grid"])


def grid_values(
    items: Sequence[str], overrides: Sequence[str], load: Callable[[list[str]], ConfigDict]
) -> dict[str, list[Any]]:
    """Returns the fields of `--grid` and their values, converted to the types of the fields.

    Args:
      items: values of the `--grid` options, `FIELD=VALUE,VALUE` each.
      overrides: `--config.FIELD=VALUE` flags, which must not set a field of the grid.
      load: function that returns the config with the given overrides.
    """
    grid: dict[str, list[Any]] = {}
    for item in items:
        field, _, text = item.partition("=")
        texts = text.split(",")
        problem = ""
        if not field or "" in texts:
            problem = "use FIELD=VALUE,VALUE, such as optimizer.learning_rate=1e-4,3e-4 (no value may contain a comma)"
        elif field == "seed":
            problem = "set the number of seeds with --seeds"
        elif field in grid:
            problem = f"another --grid sets {field}; list all its values in one option"
        elif field in overridden_fields(overrides):
            problem = f"--config.{field} sets the same field; omit one of them"
        else:
            configs = [load([f"--config.{field}={value}"]).to_dict() for value in texts]
            grid[field] = [flatten_dict(config, sep=".")[field] for config in configs]
            if len({*grid[field]}) < len(texts):
                problem = "it lists a value twice; list it once"
        if problem:
            raise UsageError(f"invalid --grid {shortened(item)}: {problem}")
    return grid


def cross_product(values: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """Returns all combinations of the fields' values."""
    return [dict(zip(values, setting, strict=True)) for setting in itertools.product(*values.values())]
