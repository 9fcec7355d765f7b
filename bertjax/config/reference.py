"""What the fields of configs mean: of one config for a person, of all of them as a document.

python -m bertjax.config.reference > docs/configs.md
"""

import textwrap
from collections.abc import Iterable
from typing import Any

from bertjax.config.fields import Field, documented
from bertjax.config.run import RunConfig
from bertjax.model.config import ModelConfig
from bertjax.tasks.build import config_class, task_names
from bertjax.tasks.finetuning.config import FinetuningConfig

_WIDTH = 100
_HEAD = """# Fields of configs

`--config EXPERIMENT` makes a config, `--config.FIELD=VALUE` sets any field of it; a name that is not here is refused.
The defaults are those of the task: an experiment may set others, and `bertjax describe --config EXPERIMENT --fields`
prints what it comes to. Made by `python -m bertjax.config.reference` from the classes that check the values.
"""


def describe_fields(settings: RunConfig) -> str:
    """Every field of a run's settings with its value and meaning, for a terminal."""
    lines = []
    for field in documented(settings, ModelConfig):
        lines.append(f"{field.path} = {field.value!r}")
        lines += textwrap.wrap(field.meaning, _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def document() -> str:
    """The reference of all fields, in Markdown."""
    run, finetuning = _fields(RunConfig()), _fields(FinetuningConfig())
    parts = [
        ("Every run", run),
        ("Pre-training", _fields(config_class("pretraining")())),
        ("Fine-tuning", finetuning),
        *((f"Task `{task}`", _fields(config_class(task)())) for task in task_names() if task != "pretraining"),
    ]
    sections = [_HEAD]
    for title, fields in parts:
        known = {"Every run": {}, "Pre-training": run, "Fine-tuning": run}.get(title, finetuning)
        own = [field for path, field in fields.items() if path != "task" and field != known.get(path)]
        if own:
            sections.append(f"## {title}\n\n{_table(own)}\n")
    return "\n".join(sections)


def _fields(settings: RunConfig) -> dict[str, Field]:
    return {field.path: field for field in documented(settings, ModelConfig)}


def _table(fields: Iterable[Field]) -> str:
    lines = ["| field | default | meaning |", "|---|---|---|"]
    for field in fields:
        lines.append(f"| `{field.path}` | {_shown(field.value)} | {field.meaning} |")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if value in ("", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(document(), end="")
