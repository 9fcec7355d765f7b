"""Fixtures of the fine-tuning tests."""

import contextlib
from pathlib import Path

import pytest
from helpers.command_runs import train
from helpers.finetuning_data import glue_files


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


@pytest.fixture(scope="session")
def topics(letters, tmp_path_factory) -> Path:
    """Returns the workdir of a run whose training file is gone; tests must not change it."""
    folder = tmp_path_factory.mktemp("topics")
    (folder / "train.csv").write_text("text,topic\n" + '"zu, ba",good\npa ke,bad\n' * 8)
    (folder / "dev.jsonl").write_text('{"text": "zu lo", "topic": "good"}\n{"text": "pa", "topic": "bad"}\n')
    (folder / "bert-base-letters.txt").write_bytes(letters.read_bytes())
    config = f"text.py:train={folder}/train.csv,dev={folder}/dev.jsonl,label=topic"
    for _ in ("new run", "repeated command"):
        train(config, folder / "run", folder / "bert-base-letters.txt")
    (folder / "train.csv").unlink()
    return folder / "run"
