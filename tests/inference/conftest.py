"""Fixture: a random checkpoint with pre-training heads in a Hugging Face folder."""

from pathlib import Path

import pytest
from checkpoints import random_checkpoint

from bertjax.convert import huggingface


@pytest.fixture(scope="session")
def pretrained(letters, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    huggingface.write(random_checkpoint(letters), folder)
    return folder
