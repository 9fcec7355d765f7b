"""Fixtures of the fine-tuning tests."""

import contextlib
from pathlib import Path

import pytest
from command_runs import train
from finetuning_data import glue_files


@pytest.fixture(scope="session")
def glue(tmp_path_factory) -> Path:
    return glue_files(tmp_path_factory.mktemp("glue"))


@pytest.fixture(scope="session")
def cola(glue, letters, tmp_path_factory) -> Path:
    """Returns the workdir of a finished CoLA run, next to a file of its stdout; tests must not change it."""
    workdir = tmp_path_factory.mktemp("cola") / "run"
    with (workdir.parent / "stdout").open("w") as file, contextlib.redirect_stdout(file):
        train(f"glue.py:task=cola,path={glue}", workdir, letters, steps=0, epochs=10)
    return workdir
