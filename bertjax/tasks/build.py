"""Construction of configs and tasks by name. Each module `bertjax/tasks/NAME.py` defines `Config` and `Task`."""

import importlib
from pathlib import Path
from types import ModuleType

from ml_collections import ConfigDict

from bertjax.config.fields import from_config_dict
from bertjax.config.run import RunConfig
from bertjax.errors import UsageError
from bertjax.tasks.task import Task

_NOT_TASKS = ("__init__", "build", "records", "task")


def task_names() -> list[str]:
    """Returns the names of all tasks."""
    return sorted(file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in _NOT_TASKS)


def config_class(task: str) -> type[RunConfig]:
    """Returns the config dataclass of a task."""
    return _module(task).Config


def parse_config(config_dict: ConfigDict) -> RunConfig:
    """Converts a config to the frozen dataclass of its task and validates all fields."""
    if "task" not in config_dict:
        raise UsageError("the config lacks the field `task`; start from the defaults in bertjax/presets.py")
    return from_config_dict(config_class(config_dict.task)(), config_dict)


def build_task(config: RunConfig, train: bool | None = False) -> Task:
    """Builds the task of a config. `train` selects whether to read training data (None: only if data is configured)."""
    return _module(config.task).Task(config, config.has_data if train is None else train)


def _module(task: object) -> ModuleType:
    if task not in task_names():
        raise UsageError(f"unknown task: config.task={task!r}; use one of {', '.join(task_names())}")
    return importlib.import_module(f"bertjax.tasks.{task}")
