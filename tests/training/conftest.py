"""Fixtures of the training tests."""

from pathlib import Path

import pytest
from small_run import make

from bertjax.training import train as loop


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> Path:
    """Returns the workdir of an uninterrupted run; tests must not change it."""
    path = tmp_path_factory.mktemp("trained") / "run"
    loop.train(make(corpus), str(path))
    return path
