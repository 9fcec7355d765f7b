"""Helpers that run commands in this process and return their output, errors and exit codes."""

import argparse

import pytest

from bertjax.cli import main as cli


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """Returns a dictionary from the words of each command, such as ("bench", "step"), to its parser."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        return {words: parser}
    return {
        key: command
        for word, child in groups[0].choices.items()
        for key, command in commands(child, (*words, word)).items()
    }


def failure(capfd, *arguments) -> tuple[int, str]:
    """Returns the exit code and stderr of a failing command."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code, capfd.readouterr().err


def refused(capfd, *arguments, code: int = 2, logs: bool = False) -> str:
    """Returns the one-line error of a command that exits with `code`; with `logs`, log lines may precede it."""
    exit_code, output = failure(capfd, *arguments)
    assert exit_code == code, output
    assert output.endswith("\n") and "Traceback" not in output, output
    *log_lines, error = output.splitlines()
    assert error.startswith("bertjax: ") and (logs or not log_lines), output
    return error


def printed(capfd, *arguments) -> str:
    """Returns the stdout of a successful command."""
    capfd.readouterr()
    cli.main([str(argument) for argument in arguments])
    return capfd.readouterr().out
