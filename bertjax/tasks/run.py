"""From the name of a task to its one file: its settings, and what is built from them."""

import importlib
from pathlib import Path
from typing import Any

from bertjax.config.run import RunConfig
from bertjax.errors import UsageError
from bertjax.tasks.task import Task

# Files of this folder that are no tasks.
_OTHERS = ("__init__", "run", "settings", "task")


def task_names() -> list[str]:
    """All tasks there are."""
    return sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in _OTHERS)


def config_class(task: str) -> type[RunConfig]:
    """The settings of a task.

    Raises:
      UsageError: there is no such task.
    """
    return _module(task).Config


def build_task(settings: RunConfig, train: bool | None = False) -> Task:
    """The task of settings.

    Args:
      train: it needs its training data; None is where the settings name data.

    Raises:
      UsageError: the data cannot be used.
    """
    return _module(settings.task).build(settings, settings.has_data if train is None else train)


def _module(task: object) -> Any:
    # Not a registry: the name is that of the one file that knows the task.
    if task not in task_names():
        raise UsageError(f"config.task is {task!r}; known: {', '.join(task_names())}")
    return importlib.import_module(f"bertjax.tasks.{task}")
