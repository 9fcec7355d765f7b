"""Commands in this process: what they print, and how they refuse."""

import argparse
import re

import pytest

from bertjax.cli import main as cli


def commands(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """Every command that does something, by its words, such as ("bench", "step")."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        return {words: parser}
    return {
        key: sub for word, child in groups[0].choices.items() for key, sub in commands(child, (*words, word)).items()
    }


def ends(capfd, *arguments) -> tuple[int, str]:
    """Exit code and stderr of a command that does not succeed."""
    with pytest.raises(SystemExit) as end:
        cli.main([str(argument) for argument in arguments])
    return end.value.code, capfd.readouterr().err


def refused(capfd, *arguments, code: int = 2) -> str:
    """The error of a command that ends with `code`, after checking that it is one line."""
    found, error = ends(capfd, *arguments)
    assert found == code, error
    assert re.fullmatch(r"bertjax: [^\n]+\n", error), error
    return error


def printed(capfd, *arguments) -> str:
    """The stdout of a command that succeeds."""
    capfd.readouterr()
    cli.main([str(argument) for argument in arguments])
    return capfd.readouterr().out
