"""Fixture: a Hugging Face folder that a test may change."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def folder(pretrained, tmp_path) -> Path:
    """Returns a copy of `pretrained`."""
    return shutil.copytree(pretrained, tmp_path / "folder")
