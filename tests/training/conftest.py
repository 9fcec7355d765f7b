"""Fixtures of the training tests."""

import shutil
from pathlib import Path

import pytest
from helpers.small_run import make

from bertjax.training import train as loop


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> Path:
    """Returns the workdir of an uninterrupted run; tests must not change it."""
    path = tmp_path_factory.mktemp("trained") / "run"
    loop.train(make(corpus), str(path))
    return path


@pytest.fixture
def interrupted(trained, tmp_path):
    """Returns a copy of the run's workdir whose newest checkpoint is that of step 8."""
    shutil.copytree(trained, tmp_path / "run")
    for step in ("12", "14"):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / step)
    return tmp_path / "run"
