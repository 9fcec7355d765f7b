"""Markdown reference of all commands, printed to standard output. `make references` writes `docs/commands.md`."""

import argparse
from collections.abc import Iterator

from bertjax.cli.main import build_parser

_HEAD = """# Commands

`bertjax COMMAND --help` prints the options of a command. `make references` generates this page.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | failure |
| 2 | usage error |
| 42 | training stopped by a signal after saving a checkpoint; the same command resumes it |
| 43, 134 | another process is lost, or no progress; the same command resumes the run |
| 130 | interrupted by a signal, nothing to save |
"""


def document() -> str:
    """Returns the reference of all commands in Markdown."""
    return "\n".join([_HEAD, *(_section(parser) for parser in _commands(build_parser()))])


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields the parser of each command, such as `bench step`."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield parser
    for group in groups:
        for child in dict.fromkeys(group.choices.values()):
            yield from _commands(child)


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
    return f"| `{name}` | {shown and f'`{shown}`'} | {_sentence(action.help or '')} |"


def _sentence(text: str) -> str:
    return text.replace("%%", "%").replace("|", "\\|")


if __name__ == "__main__":
    print(document(), end="")
