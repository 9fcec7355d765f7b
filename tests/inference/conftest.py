"""Fixtures: a random checkpoint with pre-training heads in a Hugging Face folder, and a runner of failing commands."""

from pathlib import Path

import pytest
from checkpoints import random_checkpoint

from bertjax.cli import main as cli
from bertjax.convert import huggingface


@pytest.fixture(scope="session")
def pretrained(letters, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pretrained")
    huggingface.write(random_checkpoint(letters), folder)
    return folder


@pytest.fixture
def usage_error(capfd):
    """Returns a function that runs a command, checks its exit code, and returns the error message."""

    def run(*arguments, code: int = 2) -> str:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            cli.main([str(argument) for argument in arguments])
        assert exit_info.value.code == code
        return capfd.readouterr().err.splitlines()[-1]

    return run
