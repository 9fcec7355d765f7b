"""Configs, of an experiment's file or of a checkpoint's workdir, and the tasks they describe."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from bertjax.config import load_config, load_saved_config
from bertjax.corpus.vocabulary_files import ENTRY
from bertjax.errors import UsageError
from bertjax.fields import check_parts
from bertjax.model.config import ModelConfig
from bertjax.tasks.finetuning.output_layer import OUTPUT_LAYER
from bertjax.tasks.finetuning.splits import SPLITS
from bertjax.tasks.task import Task
from bertjax.training.checkpoint import find_checkpoint, workdir_of
from bertjax.training.identity import CONFIG, architecture_of, read_meta
from bertjax.training.starting_point import adopt

_PATHS = ("corpus", "path", "vocabulary", "labels")
# Relative to `data.path`, where there is one.
_FILES = ("train_file", "dev_file", "test_file")


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
    check_parts(config, experiment.partition(":")[0])
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


def build_task(config: ConfigDict, train: bool | None = False) -> Task:
    """The task of a config.

    Args:
      train: it needs its training data; None is where the config names data.

    Raises:
      UsageError: there is no such task, or a value or the data cannot be used.
    """
    module = _checked_module(config)
    return module.build(config, module.has_data(config) if train is None else train)


def check_config(config: ConfigDict) -> None:
    """Refuses values no run can start with, without looking at the data.

    Raises:
      UsageError: there is no such task, or names the field and its value.
    """
    _checked_module(config)


def _checked_module(config: ConfigDict) -> Any:
    # Not a registry: the name is that of the one file that knows the task.
    name = str(config.task)
    if not name.isidentifier() or not (Path(__file__).parent / "tasks" / f"{name}.py").is_file():
        raise UsageError(f"config.task is {config.task!r}; there is no bertjax/tasks/{name}.py")
    module = importlib.import_module(f"bertjax.tasks.{config.task}")
    if not hasattr(module, "build"):
        raise UsageError(f"config.task is {config.task!r}, which is no task")
    module.check(config)
    return module


def checkpoint_model(checkpoint: epath.Path) -> ModelConfig:
    """The model of a checkpoint: the architecture that is sealed into it, all else as in its workdir's config.

    Raises:
      UsageError: its config does not tell.
      BertjaxError: it is damaged.
    """
    config = checkpoint_config(checkpoint, [])
    try:
        return ModelConfig(**{**config.model, **vars(architecture_of(read_meta(checkpoint)))})
    except TypeError as error:
        raise UsageError(f"{workdir_of(checkpoint) / CONFIG} does not tell the model: {error}") from error


def _make_absolute(data: ConfigDict) -> None:
    """Makes paths whole, so that the config a run saves means the same from any folder."""
    for name in (*_PATHS, *(() if data.get("path") else _FILES)):
        if data.get(name) and ":" not in data[name]:
            data[name] = os.path.abspath(os.path.expanduser(data[name]))
