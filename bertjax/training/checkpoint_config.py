"""Configs, of an experiment's file or of a checkpoint's workdir, and the tasks they describe."""

import os
from collections.abc import Sequence

from etils import epath
from ml_collections import ConfigDict

from bertjax.config.load import load_config, load_saved_config
from bertjax.config.run import DATA_FILES, DATA_PATHS
from bertjax.data.corpus.vocabulary_files import ENTRY
from bertjax.data.finetuning.tfds_rows import PREFIX
from bertjax.errors import UsageError
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.config import SPLITS
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.training.checkpoint import find_checkpoint, workdir_of
from bertjax.training.checkpoint_metadata import saved_architecture
from bertjax.training.init_from import adopt
from bertjax.training.workdir import CONFIG
from bertjax.utils.io import is_remote


def experiment_config(experiment: str, overrides: Sequence[str], start: str | epath.Path | None = None) -> ConfigDict:
    """The config of an experiment.

    Args:
      experiment: `FILE[:ARGUMENTS]`.
      overrides: `--config.FIELD=VALUE`.
      start: checkpoint that gives what the config leaves to it.

    Raises:
      UsageError: the config or the checkpoint cannot be used.
    """
    config = load_config(experiment, overrides)
    if not isinstance(config.get("data"), ConfigDict) or not isinstance(config.get("model"), ConfigDict):
        raise UsageError(
            f"the config of {experiment.partition(':')[0]} has no data or no model; begin with the defaults, see "
            "bertjax/presets.py"
        )
    _make_absolute(config.data)
    return config if start is None else adopt(config, find_checkpoint(start))


def checkpoint_config(checkpoint: epath.Path, overrides: Sequence[str]) -> ConfigDict:
    """The config a checkpoint was trained with.

    Raises:
      UsageError: there is none, or the overrides do not fit.
    """
    workdir = workdir_of(checkpoint)
    config = load_saved_config(workdir / CONFIG, overrides)
    if "vocabulary" in config.data and not _is_set("vocabulary", overrides):
        # The one it started with may be gone.
        config.data.vocabulary = str(workdir / ENTRY)
    return config if _is_set("labels", overrides) else with_labels_of(config, checkpoint)


def _is_set(name: str, overrides: Sequence[str]) -> bool:
    return any(item.startswith(f"--config.data.{name}=") for item in overrides)


def with_labels_of(config: ConfigDict, checkpoint: epath.Path) -> ConfigDict:
    """The config, with the labels that the checkpoint's outputs stand for."""
    file = workdir_of(checkpoint) / OUTPUT_LAYER
    if "labels" in config.data and file.exists():
        config.data.labels = str(file)
    return config


def choose_split(config: ConfigDict, split: str) -> ConfigDict:
    """The config, to predict the examples of `split`.

    Raises:
      UsageError: there is no such split, or the task predicts none.
    """
    if split not in SPLITS:
        raise UsageError(f"--split is {split!r}; known: {', '.join(SPLITS)}")
    if "eval_split" not in config.data:
        raise UsageError(f"the task {config.task} has no predictions to write")
    config.data.eval_split = split
    return config


def checkpoint_model(checkpoint: epath.Path) -> ModelConfig:
    """The model of a checkpoint: the architecture that is sealed into it, and how its workdir's config has it computed.

    But for attention, which is what the devices at hand do best: texts have other lengths than training rows had.

    Raises:
      UsageError: its config does not tell.
      BertjaxError: it is damaged.
    """
    config = checkpoint_config(checkpoint, [])
    try:
        return ModelConfig(**{**config.model, **vars(saved_architecture(checkpoint)), "attention": "auto"})
    except TypeError as error:
        raise UsageError(f"{workdir_of(checkpoint) / CONFIG} does not tell the model: {error}") from error


def _make_absolute(data: ConfigDict) -> None:
    """Makes paths whole, so that the config a run saves means the same from any folder."""
    for name in (*DATA_PATHS, *(() if data.get("path") else DATA_FILES)):
        if data.get(name) and not (data[name].startswith(PREFIX) or is_remote(data[name])):
            data[name] = os.path.abspath(os.path.expanduser(data[name]))
