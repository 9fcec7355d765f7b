"""The fields every config has, typed arguments after the colon, and what a config means."""

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from bertjax.data.settings import Masking, Phase, check_objective
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig, size_fields
from bertjax.training.optimizer import OptimizerConfig
from bertjax.training.sharding import MeshConfig

BATCH_READINGS = ("tokens", "sequences")


def parse_arguments(text: str | None, **defaults: Any) -> ConfigDict:
    """Arguments after the colon of `--config FILE:size=base,seq_len=128`, typed like their defaults.

    Args:
      text: `name=value` pairs with commas between them; a bare `name` sets a boolean. None or "" changes nothing.
      **defaults: every argument the experiment knows, with its default; the default's type is the argument's.

    Raises:
      UsageError: an unknown name (the known ones are listed), or a value of another type.
    """
    arguments = ConfigDict(defaults)
    for item in filter(None, (text or "").split(",")):
        name, has_value, value = item.partition("=")
        if name not in defaults:
            raise UsageError(f"unknown config argument {name!r}; known: {', '.join(defaults)}")
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
    file = config.partition(":")[0]
    if not os.path.isfile(file):
        raise UsageError(f"no config file {file}; the experiments are in the folder `experiments` of the repository")
    return _with_overrides(
        lambda values, argv: config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv),
        [f"--config={config}", *overrides],
        file,
    )


def load_saved_config(file: os.PathLike, overrides: Sequence[str]) -> ConfigDict:
    """Reads the `config.json` of a workdir and applies overrides.

    Raises:
      UsageError: as `load_config`.
    """
    try:
        with open(file, encoding="utf-8") as handle:
            saved = ConfigDict(json.load(handle))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {file} ({error}); give --config") from error
    return _with_overrides(
        lambda values, argv: config_flags.DEFINE_config_dict("config", saved, flag_values=values), list(overrides), file
    )


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
        rest = values(argv)[1:]
        config = holder.value
    except UsageError:
        raise
    except SyntaxError as error:
        raise UsageError(f"the config file {file} is not valid Python: {error}") from error
    except (AttributeError, ImportError, KeyError, NameError, TypeError, ValueError, flags.Error) as error:
        raise UsageError(f"cannot apply {' '.join(argv[1:])}: {' '.join(str(error).split())[:300]}") from error
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}; fields of the config are set with --config.FIELD=VALUE")
    if not isinstance(config, ConfigDict):
        raise UsageError(f"get_config of {file} must return an ml_collections.ConfigDict")
    return config


def _refuse_unknown_fields(config: ConfigDict, settings: list[str]) -> None:
    for item in settings:
        names = item.removeprefix("--config.").partition("=")[0].split(".")
        node: Any = config
        for depth, name in enumerate(names):
            if not isinstance(node, ConfigDict) or name not in node:
                here = ".".join(["config", *names[:depth]])
                known = ", ".join(sorted(node)) if isinstance(node, ConfigDict) else "none, it is a value"
                raise UsageError(f"unknown field {'.'.join(names)!r}: {here} has no {name!r}; known: {known}")
            node = node[name]


def base_config(size: str = "base") -> ConfigDict:
    """Defaults of every field, with the model of a named size."""
    config = ConfigDict()
    config.task = "pretraining"  # a module of bertjax.tasks
    config.seed = 0
    config.steps = 1_000_000
    config.log_every = 100
    config.eval_every = 10_000
    config.checkpoint_every = 10_000
    config.keep_checkpoints = 3
    config.accumulate = 1  # micro-batches a step
    # A logged loss over this many times the first logged one stops the run.
    config.divergence_factor = 3.0

    config.data = ConfigDict()
    config.data.corpus = ""
    config.data.seq_len = 128
    config.data.batch_size = 256
    config.data.max_predictions = 0  # 0: masking.rate of seq_len, rounded up (20 at 128, 77 at 512)
    config.data.objective = "nsp"
    config.data.pair_passes = 10  # as many as google-research/bert's dupe_factor
    config.data.eval_rows = 0  # 0: all held-out rows
    config.data.masking = ConfigDict()
    config.data.masking.rate = 0.15
    config.data.masking.mask_share = 0.8
    config.data.masking.same_share = 0.1
    config.data.masking.random_share = 0.1
    config.data.masking.whole_word = False

    # The paper trains the last 10 % of steps at length 512 (A.2). Its batch can be read in two ways: 256 sequences at
    # both lengths, or 131,072 tokens at both. `tokens` keeps data.batch_size * data.seq_len tokens in the long phase,
    # `sequences` keeps data.batch_size rows.
    config.long_phase = ConfigDict()
    config.long_phase.share = 0.0
    config.long_phase.seq_len = 512
    config.long_phase.max_predictions = 0
    config.long_phase.batch_reading = "tokens"

    config.model = ConfigDict(dataclasses.asdict(ModelConfig(**size_fields(size))))
    config.model.vocab_size = 0  # 0: the corpus's
    config.optimizer = ConfigDict(dataclasses.asdict(OptimizerConfig()))
    config.mesh = ConfigDict(dataclasses.asdict(MeshConfig()))
    return config


def check(config: ConfigDict) -> None:
    """Refuses values no run can start with.

    Raises:
      UsageError: names the field and its value.
    """
    for name in ("steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "accumulate"):
        if config[name] < 1:
            raise UsageError(f"config.{name} is {config[name]}; it must be at least 1")
    check_objective(config.data.objective)
    Masking(**config.data.masking)
    reading = config.long_phase.batch_reading
    if reading not in BATCH_READINGS:
        raise UsageError(f"config.long_phase.batch_reading is {reading!r}; known: {', '.join(BATCH_READINGS)}")
    if not 0 <= config.long_phase.share < 1:
        raise UsageError(f"config.long_phase.share is {config.long_phase.share}; it must be in [0, 1)")
    for phase in phases(config):
        if phase.seq_len > config.model.max_positions:
            raise UsageError(
                f"rows of {phase.seq_len} tokens do not fit config.model.max_positions={config.model.max_positions}"
            )
        if phase.batch_size % config.accumulate:
            raise UsageError(
                f"a batch of {phase.batch_size} rows does not split in config.accumulate={config.accumulate}"
            )
    OptimizerConfig(**config.optimizer)
    model_config(config, config.model.vocab_size or 1)


def model_config(config: ConfigDict, vocab_size: int) -> ModelConfig:
    """The model that a config and a vocabulary give.

    Raises:
      UsageError: config.model.vocab_size is given and differs from the vocabulary's.
    """
    given = config.model.vocab_size
    if given and given != vocab_size:
        raise UsageError(f"config.model.vocab_size is {given}, the corpus's vocabulary has {vocab_size} pieces")
    return ModelConfig(**{**config.model, "vocab_size": vocab_size})


def phases(config: ConfigDict) -> tuple[Phase, ...]:
    """The stretches of training with one batch shape each: one, or two where the config has a long phase."""

    def phase(seq_len: int, batch_size: int, predictions: int, start: int, stop: int) -> Phase:
        predictions = predictions or math.ceil(round(config.data.masking.rate * seq_len, 6))
        return Phase(seq_len, batch_size, predictions, start, stop)

    data, long = config.data, config.long_phase
    boundary = config.steps - round(config.steps * long.share)
    first = phase(data.seq_len, data.batch_size, data.max_predictions, 0, boundary)
    if boundary == config.steps:
        return (first,)
    rows = data.batch_size
    if long.batch_reading == "tokens":
        rows = max(1, data.batch_size * data.seq_len // long.seq_len)
    return first, phase(long.seq_len, rows, long.max_predictions, boundary, config.steps)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Each field in which two nested dictionaries differ, as `name: old value -> new value`."""
    found = []
    for name in sorted({*old, *new}):
        before, after = old.get(name, "(absent)"), new.get(name, "(absent)")
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif before != after:
            found.append(f"{prefix}{name}: {before} -> {after}")
    return found
