"""Table of tasks, and functions that build configs and tasks by task name."""

from collections.abc import Callable

from ml_collections import ConfigDict

from bertjax.config.fields import from_config_dict
from bertjax.config.run import RunConfig
from bertjax.errors import UsageError
from bertjax.tasks.embedding.config import EmbedConfig
from bertjax.tasks.embedding.task import EmbedTask
from bertjax.tasks.glue import GlueConfig, GlueTask
from bertjax.tasks.ner import NerConfig, NerTask
from bertjax.tasks.pretraining.adaptation import AdaptationConfig, AdaptationTask
from bertjax.tasks.pretraining.config import PretrainingConfig
from bertjax.tasks.pretraining.task import PretrainingTask
from bertjax.tasks.squad import SquadConfig, SquadTask
from bertjax.tasks.swag import SwagConfig, SwagTask
from bertjax.tasks.task import Task
from bertjax.tasks.text import TextConfig, TextTagsConfig, TextTagsTask, TextTask

# Config class and task class, keyed by `config.task`.
TASKS: dict[str, tuple[type[RunConfig], Callable[..., Task]]] = {
    "adaptation": (AdaptationConfig, AdaptationTask),
    "embed": (EmbedConfig, EmbedTask),
    "glue": (GlueConfig, GlueTask),
    "ner": (NerConfig, NerTask),
    "pretraining": (PretrainingConfig, PretrainingTask),
    "squad": (SquadConfig, SquadTask),
    "swag": (SwagConfig, SwagTask),
    "text": (TextConfig, TextTask),
    "text_tags": (TextTagsConfig, TextTagsTask),
}


def config_class(task: str) -> type[RunConfig]:
    """Returns the config dataclass of a task."""
    if task not in TASKS:
        raise UsageError(
            f"unknown task: config.task={task!r}; use one of {', '.join(TASKS)}, or name the experiment file that "
            "defines the task with --config"
        )
    return TASKS[task][0]


def parse_config(config_dict: ConfigDict) -> RunConfig:
    """Converts a config to the frozen dataclass of its task and validates all fields. Does not fill in unset fields."""
    return from_config_dict(config_class(config_dict.task)(), config_dict)


def build_task(config: RunConfig, train: bool | None = False) -> Task:
    """Builds the task of a config. `train` selects whether to read training data (None: only if data is configured)."""
    return TASKS[config.task][1](config, config.has_data if train is None else train)
