"""Reference pages of the documents: commands and the Python API."""

import re
from pathlib import Path

from commanding import commands

import bertjax
from bertjax.cli.command_reference import document
from bertjax.cli.main import build_parser

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_command_reference_is_up_to_date():
    assert PAGE.read_text() == document()


def test_command_reference_has_all_commands_and_options():
    text = PAGE.read_text()
    for words, parser in commands(build_parser()).items():
        assert f"## bertjax {' '.join(words)}\n" in text
        assert all(option in text for option in parser._option_string_actions if option not in ("-h", "--help"))


def test_api_page_has_all_public_names():
    text = (PAGE.parent / "api.md").read_text()
    assert sorted(re.findall(r"^::: bertjax\.(\w+)$", text, re.MULTILINE)) == sorted(bertjax.__all__)
