"""What fields configs have, what they mean, and which values no run can start with."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from bertjax.data.pretraining.settings import Masking, Phase, check_objective
from bertjax.errors import UsageError, shortened
from bertjax.model.architecture import ARCHITECTURE_FIELDS, size_fields
from bertjax.model.config import ModelConfig
from bertjax.training.optimizer import OptimizerConfig
from bertjax.training.sharding import MeshConfig

BATCH_READINGS = ("tokens", "sequences")
# Of integer fields; those that are not here fit into 32 bits, as the counters on the device do.
_MOST = {
    "seed": 2**32 - 1,
    "accumulate": 1 << 20,
    "data.batch_size": 1 << 20,
    "data.eval_batch_size": 1 << 20,
    "data.pair_passes": 10_000,
    "long_phase.seq_len": 1 << 20,
}
_MOST_INTEGER = 2**31 - 1


def _common_config() -> ConfigDict:
    config = ConfigDict()
    config.task = ""  # a module of bertjax.tasks
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
    config.model = ConfigDict(dataclasses.asdict(ModelConfig()))
    config.optimizer = ConfigDict(dataclasses.asdict(OptimizerConfig()))
    config.mesh = ConfigDict(dataclasses.asdict(MeshConfig()))
    return config


def check_parts(config: ConfigDict, file: str) -> None:
    """Refuses a config that was not made from those of this module.

    Raises:
      UsageError: it lacks fields that every config has, or has something else in their place.
    """
    usual = _common_config()
    if lacking := [name for name in usual if name not in config]:
        raise UsageError(f"the config of {file} has no {', '.join(lacking)}; begin with one of bertjax.fields")
    for name, value in usual.items():
        kind, what = (
            (ConfigDict, "a section of fields")
            if isinstance(value, ConfigDict)
            else (str, "a name")
            if isinstance(value, str)
            else ((int, float), "a number")
        )
        if not isinstance(config[name], kind):
            raise UsageError(f"config.{name} of {file} is {shortened(repr(config[name]))}; it must be {what}")


def pretraining_config(size: str = "base") -> ConfigDict:
    """Defaults of every field of a pre-training run, with the model of a named size."""
    config = _common_config()
    config.task = "pretraining"
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

    config.model.update(size_fields(size))
    config.model.vocab_size = 0  # 0: the corpus's
    return config


def finetuning_config(task: str, size: str = "") -> ConfigDict:
    """Defaults of every field of a fine-tuning run (section A.3 of the paper).

    Args:
      task: a module of `bertjax.tasks`.
      size: of a model that starts from random parameters; "" is that of the checkpoint the run starts from.
    """
    config = _common_config()
    config.task = task
    config.steps = 0  # 0: `epochs`
    config.epochs = 3
    config.log_every = 50
    config.eval_every = 0  # 0: once an epoch
    config.checkpoint_every = 0  # 0: once an epoch
    config.keep_checkpoints = 1  # besides the best one
    config.select_by = ""  # evaluation metric by which the best checkpoint is kept; "": the task's own
    config.patience = 0  # evaluations without a better one after which the run ends; 0: it never does
    config.label_smoothing = 0.0  # share of a label's probability spread over all classes, in training
    config.data.path = ""
    config.data.eval_split = "dev"  # or test, or none: the last checkpoint is kept
    config.data.train_share = 1.0  # of the training rows, the same ones for every seed
    config.data.dev_share = 0.0  # of the training rows (documents, passages), cut off as the dev set; 0: the dev file
    config.data.dev_seed = 0  # which ones; not config.seed, so that runs of several seeds have one dev set
    config.data.class_weights = ""  # balanced, or JSON: '{"rare": 5}'; in training; "": 1 for each class
    config.data.vocabulary = ""  # "": the checkpoint's
    config.data.labels = ""  # an output_layer.json; "": the labels of the training file
    config.data.seq_len = 128
    config.data.batch_size = 32
    config.data.eval_batch_size = 64
    config.data.bucket = 32  # rows are padded to a multiple of this; 0: to seq_len
    if size:
        config.model.update({**size_fields(size), "vocab_size": 0})
    else:
        # 0 and empty: the checkpoint's.
        config.model.update({name: type(config.model[name])() for name in ARCHITECTURE_FIELDS})
    config.optimizer.learning_rate = 5e-5
    config.optimizer.warmup_steps = -1  # -1: a tenth of all steps, as in google-research/bert
    return config


def grid(name: str) -> list[dict[str, Any]]:
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


def cross_product(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All trials that take one value of each field."""
    return [dict(zip(values, trial, strict=True)) for trial in itertools.product(*values.values())]


def make_quick(config: ConfigDict, seq_len: int) -> None:
    """A few steps on short rows, to see a fine-tuning experiment run whole within a minute on CPU."""
    config.steps = 4
    config.log_every = 2
    config.data.batch_size = 8
    config.data.seq_len = seq_len
    config.model.dtype = "float32"


def check_common(config: ConfigDict, zero_allowed: tuple[str, ...] = ()) -> None:
    """Refuses values no run can start with.

    Args:
      zero_allowed: counts that may be 0, where 0 stands for something else.

    Raises:
      UsageError: names the field and its value.
    """
    for name in ("steps", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints", "accumulate"):
        least = 0 if name in zero_allowed else 1
        if config[name] < least:
            raise UsageError(f"config.{name} is {config[name]}; it must be at least {least}")
    OptimizerConfig(**config.optimizer)
    MeshConfig(**config.mesh)
    if not 0 <= config.seed < 2**32:
        raise UsageError(f"config.seed is {config.seed}; it must be between 0 and 2^32 - 1")
    if not config.divergence_factor > 0:
        raise UsageError(f"config.divergence_factor is {config.divergence_factor}; it must be above 0")
    warmup, least = config.optimizer.warmup_steps, -1 if "steps" in zero_allowed else 0
    if warmup < least:
        raise UsageError(f"config.optimizer.warmup_steps is {warmup}; it must be at least {least}")
    _check_limits(config, "")
    tokens = config.data.batch_size * config.data.seq_len
    if tokens > _MOST_INTEGER:
        raise UsageError(f"{tokens:,} tokens a batch; config.data.batch_size x seq_len is at most {_MOST_INTEGER:,}")


def _check_limits(node: ConfigDict, prefix: str) -> None:
    """Raises a UsageError if an integer anywhere in a config is beyond any use."""
    for field, value in node.items():
        name = prefix + field
        if isinstance(value, ConfigDict):
            _check_limits(value, f"{name}.")
        elif isinstance(value, int) and abs(value) > _MOST.get(name, _MOST_INTEGER):
            raise UsageError(f"config.{name} is {value:,}; it must be at most {_MOST.get(name, _MOST_INTEGER):,}")


def check_pretraining(config: ConfigDict) -> None:
    """Refuses values no pre-training run can start with.

    Raises:
      UsageError: names the field and its value.
    """
    check_common(config)
    check_objective(config.data.objective)
    for name, least in (("pair_passes", 1), ("eval_rows", 0), ("max_predictions", 0)):
        if config.data[name] < least:
            raise UsageError(f"config.data.{name} is {config.data[name]}; it must be at least {least}")
    if config.data.objective == "nsp" and config.model.num_segments < 2:
        raise UsageError(f"config.model.num_segments is {config.model.num_segments}; sentence pairs have 2 segments")
    Masking(**config.data.masking)
    reading = config.long_phase.batch_reading
    if reading not in BATCH_READINGS:
        raise UsageError(f"config.long_phase.batch_reading is {reading!r}; known: {', '.join(BATCH_READINGS)}")
    if not 0 <= config.long_phase.share < 1:
        raise UsageError(f"config.long_phase.share is {config.long_phase.share}; it must be in [0, 1)")
    for phase in phases(config):
        check_length(config, phase.seq_len)
        if phase.batch_size % config.accumulate:
            raise UsageError(
                f"a batch of {phase.batch_size} rows does not split in config.accumulate={config.accumulate}"
            )
    model_config(config, config.model.vocab_size or 1)


def check_length(config: ConfigDict, seq_len: int) -> None:
    """Raises a UsageError if rows of `seq_len` tokens are too long for the model."""
    if seq_len > config.model.max_positions:
        raise UsageError(f"rows of {seq_len} tokens do not fit config.model.max_positions={config.model.max_positions}")


def model_config(config: ConfigDict, vocab_size: int) -> ModelConfig:
    """The model that a config and a vocabulary give.

    Raises:
      UsageError: config.model.vocab_size is given and differs from the vocabulary's.
    """
    given = config.model.vocab_size
    if given and given != vocab_size:
        raise UsageError(f"config.model.vocab_size is {given}, the vocabulary has {vocab_size} pieces")
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
