"""Checkpoints with random parameters, in the form of Hugging Face."""

from pathlib import Path

import pytest
from checkpoints import portable

from bertjax.convert import huggingface


@pytest.fixture(scope="session")
def pretrained(letters, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    huggingface.write(portable(letters), folder)
    return folder
