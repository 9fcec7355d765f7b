"""Fixture of a table of tiny runs."""

from pathlib import Path

import pytest
from helpers.tiny_table import write_table


@pytest.fixture(scope="session")
def table(corpus, tmp_path_factory) -> Path:
    """Returns the experiment file of the table; tests must not change it."""
    return write_table(tmp_path_factory.mktemp("table"), corpus)
