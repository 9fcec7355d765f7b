"""Writes the pages of `docs/` that list all commands and all config fields: `make references`."""

import argparse
from pathlib import Path
from typing import Any

from helpers.commanding import commands

from bertjax.cli.main import build_parser
from bertjax.config.fields import iter_fields
from bertjax.config.run import RunConfig
from bertjax.data.pretraining.config import PhaseConfig
from bertjax.tasks.build import TASKS, config_class
from bertjax.tasks.finetuning.config import FinetuningConfig

_COMMANDS_HEAD = """# Commands

`bertjax COMMAND --help` prints the options of a command. `make references` generates this page.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure |
| 2 | usage error |
| 42 | training stopped by a signal after saving a checkpoint; the same command resumes it |
| 43, 134 | another process is lost, or no progress; the same command resumes the run |
| 130 | interrupted by a signal, nothing to save; run the same command again |
"""


def commands_page() -> str:
    """Returns the reference of all commands in Markdown."""
    return "\n".join([_COMMANDS_HEAD, *map(_section, commands(build_parser()).values())])


def _section(parser: argparse.ArgumentParser) -> str:
    example, _, note = (parser.epilog or "").removeprefix("example:\n").partition("\n\n")
    block = "\n".join(f"    {line.strip()}" for line in example.splitlines())
    rows = ["| option | default | meaning |", "|---|---|---|"]
    rows += [_row(action) for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    return "\n\n".join(filter(None, [f"## {parser.prog}", parser.description, block, note, "\n".join(rows)])) + "\n"


def _row(action: argparse.Action) -> str:
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    if not action.option_strings:
        name = str(value)
    else:
        name = ", ".join(action.option_strings) + (f" {value}" if action.nargs != 0 else "")
    default = "required" if action.required and action.option_strings else action.default
    shown = "" if default in (None, False, "", []) else str(default)
    meaning = (action.help or "").replace("%%", "%").replace("|", "\\|")
    return f"| `{name}` | {shown and f'`{shown}`'} | {meaning} |"


_FIELDS_HEAD = """# Config fields

`--config EXPERIMENT` loads a config, and `--config.FIELD=VALUE` overrides a field. Unknown names are rejected. The
tables list the defaults of each task. An experiment may change them: `bertjax describe --config EXPERIMENT --fields`
prints the resulting values. `make references` generates this page from the config classes.
"""


def configs_page() -> str:
    """Returns the reference of all config fields in Markdown."""
    run, finetuning = _fields(RunConfig()), _fields(FinetuningConfig())
    pretraining = _fields(config_class("pretraining")())
    # Each tuple is a section's title, its fields, and the fields of an earlier section. Fields with the same default
    # and meaning in the earlier section are omitted.
    sections = [
        ("Every run", run, {}),
        ("Pre-training", pretraining, run),
        ("Items of `phases`", _fields(PhaseConfig(), "phases[]."), {}),
        ("Continued pre-training", _fields(config_class("adaptation")()), pretraining),
        ("Fine-tuning", finetuning, run),
    ]
    tasks = [task for task in TASKS if task not in ("pretraining", "adaptation")]
    sections += [(f"Task `{task}`", _fields(config_class(task)()), finetuning) for task in tasks]
    texts = [_FIELDS_HEAD]
    for title, fields, documented in sections:
        new = {path: field for path, field in fields.items() if path != "task" and field != documented.get(path)}
        if new:
            texts.append(f"## {title}\n\n{_table(new)}\n")
    return "\n".join(texts)


def _fields(config: Any, prefix: str = "") -> dict[str, tuple[Any, str]]:
    return {path: (value, meaning) for path, value, meaning in iter_fields(config, prefix)}


def _table(fields: dict[str, tuple[Any, str]]) -> str:
    lines = ["| field | default | meaning |", "|---|---|---|"]
    lines += [f"| `{path}` | {_formatted(value)} | {meaning} |" for path, (value, meaning) in fields.items()]
    return "\n".join(lines)


def _formatted(value: Any) -> str:
    """Formats a value as on the command line. Returns "" for an empty value."""
    if value is None or value in ("", ()):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# Content of each generated page, by its path.
_DOCS = Path(__file__).parents[1] / "docs"
PAGES = {_DOCS / "commands.md": commands_page, _DOCS / "configs.md": configs_page}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page())
