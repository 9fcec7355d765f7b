"""Markdown reference of all config fields, printed to standard output. `make references` writes `docs/configs.md`."""

from collections.abc import Iterable
from typing import Any

from bertjax.config.fields import Field, iter_fields
from bertjax.config.run import RunConfig
from bertjax.tasks.build import TASKS, config_class
from bertjax.tasks.finetuning.config import FinetuningConfig

_HEAD = """# Config fields

`--config EXPERIMENT` loads a config, and `--config.FIELD=VALUE` overrides a field. Unknown names are rejected. The
tables list the defaults of each task. An experiment may change them: `bertjax describe --config EXPERIMENT --fields`
prints the resulting values. `make references` generates this page from the config classes.
"""


def document() -> str:
    """Returns the reference of all config fields in Markdown."""
    run, finetuning = _fields(RunConfig()), _fields(FinetuningConfig())
    pretraining = _fields(config_class("pretraining")())
    # Each tuple is a section's title, its fields, and the fields of an earlier section. Fields with the same default
    # and meaning in the earlier section are omitted.
    sections = [
        ("Every run", run, {}),
        ("Pre-training", pretraining, run),
        ("Continued pre-training", _fields(config_class("adaptation")()), pretraining),
        ("Fine-tuning", finetuning, run),
    ]
    tasks = [task for task in TASKS if task not in ("pretraining", "adaptation")]
    sections += [(f"Task `{task}`", _fields(config_class(task)()), finetuning) for task in tasks]
    texts = [_HEAD]
    for title, fields, documented in sections:
        new = [field for path, field in fields.items() if path != "task" and field != documented.get(path)]
        if new:
            texts.append(f"## {title}\n\n{_table(new)}\n")
    return "\n".join(texts)


def _fields(config: RunConfig) -> dict[str, Field]:
    return {field.path: field for field in iter_fields(config)}


def _table(fields: Iterable[Field]) -> str:
    lines = ["| field | default | meaning |", "|---|---|---|"]
    lines += [f"| `{field.path}` | {_formatted(field.value)} | {field.meaning} |" for field in fields]
    return "\n".join(lines)


def _formatted(value: Any) -> str:
    """Formats a value as on the command line. Returns "" for an empty value."""
    if value is None or value in ("", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(document(), end="")
