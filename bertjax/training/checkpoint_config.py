"""Functions that load the configs of experiments and of checkpoints."""

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from ml_collections import ConfigDict

from bertjax.config.load import load_config, load_saved_config, overridden_fields
from bertjax.config.run import DATA_FILES, DATA_PATHS
from bertjax.data.corpus.vocabulary import ENTRY
from bertjax.data.finetuning.tables import TFDS_PREFIX
from bertjax.errors import UsageError
from bertjax.model.config import AUTO, ModelConfig, size_fields
from bertjax.tasks.finetuning.config import SPLITS
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER, read_output_layer
from bertjax.training.checkpoint import find_checkpoint, workdir_of
from bertjax.training.checkpoint_metadata import saved_architecture
from bertjax.training.init_from import with_checkpoint_architecture
from bertjax.training.parameters import lacks_lm_head
from bertjax.training.workdir import CONFIG
from bertjax.utils.io import is_remote


def experiment_config(
    experiment: str, overrides: Sequence[str], init_from: str | epath.Path | None = None
) -> ConfigDict:
    """Loads the config of an experiment and applies `--config.FIELD=VALUE` overrides.

    `experiment` has any form that `load_config` accepts. With `init_from`, uses the architecture of this checkpoint,
    and its vocabulary if the config sets none. `optimizer.head_steps` of the experiment applies only if this checkpoint
    lacks a language-model head, and is at most a third of the steps.
    """
    config = load_config(experiment, overrides)
    if not isinstance(config.get("data"), ConfigDict) or not isinstance(config.get("model"), ConfigDict):
        raise UsageError(
            f"the config of {experiment.partition(':')[0]} lacks `data` or `model`; start from a config of "
            "bertjax/presets.py"
        )
    _make_absolute(config.data)
    if config.optimizer.head_steps and "optimizer.head_steps" not in overridden_fields(overrides):
        has_new_head = init_from is not None and lacks_lm_head(find_checkpoint(init_from))
        # `config.steps` may be lower than in the experiment. If it is higher, a finished run continues.
        config.optimizer.head_steps = min(config.optimizer.head_steps, config.steps // 3) if has_new_head else 0
    if init_from is None:
        return config
    explicit = {field.removeprefix("model.") for field in overridden_fields(overrides)}
    if re.search("(^|,)size=.", experiment.partition(":")[2]):
        explicit |= size_fields("base").keys()
    return with_checkpoint_architecture(config, find_checkpoint(init_from), explicit)


def checkpoint_config(checkpoint: epath.Path, overrides: Sequence[str]) -> ConfigDict:
    """Loads the config that a checkpoint was trained with, and applies `--config.FIELD=VALUE` overrides.

    The vocabulary and the labels are those in the workdir, unless an override sets them.
    """
    workdir, overridden = workdir_of(checkpoint), overridden_fields(overrides)
    config = load_saved_config(workdir / CONFIG, overrides)
    for name, saved in vars(saved_architecture(checkpoint)).items():
        if f"model.{name}" in overridden and config.model[name] != saved:
            raise UsageError(
                f"config.model.{name}={config.model[name]} differs from {name}={saved} of {checkpoint}; "
                "omit the override"
            )
    if config.model.dtype == AUTO and jax.default_backend() == "cpu":
        config.model.dtype = "float32"  # Only training computes in bfloat16 on CPU.
    if "vocabulary" in config.data and "data.vocabulary" not in overridden:
        # Use the workdir's copy, because the original may have been removed.
        config.data.vocabulary = str(workdir / ENTRY)
    return config if "data.labels" in overridden else with_labels_of(config, checkpoint)


def with_labels_of(config: ConfigDict, checkpoint: epath.Path) -> ConfigDict:
    """Returns the config with `data.labels` set to the path of a checkpoint's `output_layer.json`, if it exists.

    With generic labels such as LABEL_0, the task reads its labels from the training file if there is one, and
    `check_output_layer` matches them by position.
    """
    layer = read_output_layer(workdir_of(checkpoint))
    train_file = config.data.get("train_file")
    has_training_file = bool(train_file) and os.path.isfile(os.path.join(config.data.path or "", train_file))
    if "labels" in config.data and layer and not (layer.has_generic_labels and has_training_file):
        config.data.labels = str(workdir_of(checkpoint) / OUTPUT_LAYER)
    return config


def choose_split(config: ConfigDict, split: str) -> ConfigDict:
    """Returns the config with `data.eval_split` set to `split`."""
    if split not in SPLITS:
        raise UsageError(f"unknown --split: {split!r}; use one of {', '.join(SPLITS)}")
    if "eval_split" not in config.data:
        raise UsageError(f"the task {config.task} does not make predictions; use a checkpoint of another task")
    config.data.eval_split = split
    return config


def choose_evaluation(config: ConfigDict, split: str) -> ConfigDict:
    """Returns the config for the evaluation of a split.

    For the test split, sets `data.dev_file` to the test file, because a task may ignore the labels of a test file.
    """
    config = choose_split(config, split)
    if split != SPLITS[0] and "test_file" in config.data:
        if not config.data.test_file:
            raise UsageError("no test file; set it with --config.data.test_file=FILE")
        config.data.dev_file, config.data.eval_split = config.data.test_file, SPLITS[0]
        if "dev_share" in config.data:
            config.data.dev_share = 0.0
    return config


def checkpoint_model(checkpoint: epath.Path) -> ModelConfig:
    """Returns the model config of a checkpoint.

    The architecture comes from the checkpoint, and other fields come from the workdir's config. The attention
    implementation is `auto`, because devices and row lengths may differ from training.
    """
    config = checkpoint_config(checkpoint, [])
    try:
        fields: dict[str, Any] = {**config.model, **vars(saved_architecture(checkpoint)), "attention": "auto"}
        return ModelConfig(**fields)
    except TypeError as error:
        raise UsageError(
            f"{workdir_of(checkpoint) / CONFIG} contains no valid model config: {error}; restore the file"
        ) from error


def _make_absolute(data: ConfigDict) -> None:
    """Makes paths absolute, so that a saved config does not depend on the working directory."""
    for name in (*DATA_PATHS, *(() if data.get("path") else DATA_FILES)):
        if data.get(name) and not (data[name].startswith(TFDS_PREFIX) or is_remote(data[name])):
            data[name] = os.path.abspath(os.path.expanduser(data[name]))
