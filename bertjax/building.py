"""A config to the task it describes: an experiment's file, or what the workdir of a checkpoint keeps."""

import importlib
import os
from pathlib import Path

from etils import epath
from ml_collections import ConfigDict

from bertjax.config import load_config, load_saved_config
from bertjax.errors import UsageError
from bertjax.tasks.finetuning import OUTPUT_LAYER
from bertjax.tasks.task import Task
from bertjax.tasks.vocabulary_files import ENTRY, workdir_vocabulary
from bertjax.training.checkpoint import find_checkpoint, workdir_of
from bertjax.training.starting_point import adopt
from bertjax.training.workdir import CONFIG

_PRETRAINING = "pretraining"
_PATHS = ("corpus", "path", "vocabulary", "labels")
# Relative to `data.path`, where there is one.
_FILES = ("train_file", "dev_file", "test_file")


def from_experiment(
    experiment: str,
    overrides: list[str],
    *,
    train: bool = False,
    start: str | epath.Path | None = None,
    split: str = "",
) -> tuple[ConfigDict, Task]:
    """The config of an experiment, and its task.

    Args:
      experiment: `FILE[:ARGUMENTS]`.
      overrides: `--config.FIELD=VALUE`.
      train: the task needs its training data.
      start: checkpoint that the parameters come from, and what the config leaves to it.
      split: to evaluate; "" is the config's.

    Raises:
      UsageError: the config, its data or the checkpoint cannot be used.
    """
    config = load_config(experiment, overrides)
    _make_absolute(config.data)
    if start is not None:
        config = adopt(config, find_checkpoint(start))
    return _config_and_task(config, train, split)


def from_checkpoint(checkpoint: epath.Path, overrides: list[str], split: str = "") -> tuple[ConfigDict, Task]:
    """The config a checkpoint was trained with, and its task for evaluation.

    Raises:
      UsageError: as `from_experiment`.
    """
    workdir = workdir_of(checkpoint)
    config = load_saved_config(workdir / CONFIG, overrides)
    if "vocabulary" in config.data:
        # The one it started with may be gone.
        config.data.vocabulary = str(workdir / ENTRY)
        if (workdir / OUTPUT_LAYER).exists():
            config.data.labels = str(workdir / OUTPUT_LAYER)
    return _config_and_task(config, False, split)


def pretrained(checkpoint: epath.Path) -> Task:
    """The pre-training task of a checkpoint, without its corpus.

    Raises:
      UsageError: the checkpoint is of another task, so that it has no masked language model.
    """
    workdir = workdir_of(checkpoint)
    config = load_saved_config(workdir / CONFIG, [])
    if config.task != _PRETRAINING:
        raise UsageError(f"{checkpoint} was trained for {config.task}; give a checkpoint of pre-training")
    config.data.corpus, config.model.vocab_size = "", workdir_vocabulary(workdir).size
    return _config_and_task(config, False, "")[1]


def _make_absolute(data: ConfigDict) -> None:
    """Makes paths whole, so that the config a run saves means the same from any folder."""
    for name in (*_PATHS, *(() if data.get("path") else _FILES)):
        if data.get(name) and ":" not in data[name]:
            data[name] = os.path.abspath(os.path.expanduser(data[name]))


def _config_and_task(config: ConfigDict, train: bool, split: str) -> tuple[ConfigDict, Task]:
    if split:
        if "eval_split" not in config.data:
            raise UsageError(f"the task {config.task} has no predictions to write")
        config.data.eval_split = split
    # Not a registry: the name is that of the one file that knows the task.
    if not config.task.isidentifier() or not (Path(__file__).parent / "tasks" / f"{config.task}.py").is_file():
        raise UsageError(f"config.task is {config.task!r}; there is no bertjax/tasks/{config.task}.py")
    module = importlib.import_module(f"bertjax.tasks.{config.task}")
    if not hasattr(module, "build"):
        raise UsageError(f"config.task is {config.task!r}, which is no task")
    module.check(config)
    return config, module.build(config, train)
