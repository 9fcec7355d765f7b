"""Fixtures: checkpoints of other formats."""

import shutil
from pathlib import Path

import pytest
from helpers.checkpoints import google_checkpoint


@pytest.fixture
def folder(pretrained, tmp_path) -> Path:
    """Returns a copy of `pretrained`, a Hugging Face folder, that a test may change."""
    return shutil.copytree(pretrained, tmp_path / "folder")


@pytest.fixture(scope="package")
def google(letters, tmp_path_factory) -> Path:
    """Returns a checkpoint in the format of google-research/bert; tests must not change it."""
    folder = tmp_path_factory.mktemp("released") / "google"
    google_checkpoint(letters, folder)
    return folder
