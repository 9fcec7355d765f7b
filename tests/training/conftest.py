"""What tests of runs share."""

from pathlib import Path

import pytest
from small_run import make

from bertjax.training import train as loop


@pytest.fixture(scope="session")
def whole(corpus, tmp_path_factory) -> Path:
    """The workdir of a run that nothing disturbed; tests must not change it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    config, task = make(corpus)
    loop.train(task, str(path))
    return path
