"""What several tests of fine-tuning read."""

from pathlib import Path

import pytest
from finetuning_data import glue_files
from running import train


@pytest.fixture(scope="session")
def glue(tmp_path_factory) -> Path:
    return glue_files(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="session")
def cola(glue, letters, tmp_path_factory) -> Path:
    """The workdir of a finished run that has learnt its task; tests must not change it."""
    workdir = tmp_path_factory.mktemp("cola") / "run"
    train(f"glue.py:task=cola,path={glue}", workdir, letters, steps=0, epochs=10)
    return workdir
