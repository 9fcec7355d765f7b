"""Test that runs `tests/kill_and_resume.py`, which kills a training run at random times."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kill_and_resume.py"


@pytest.mark.slow
def test_run_killed_twenty_times_equals_an_uninterrupted_run():
    # Eight fake devices would be slow on a machine with few cores.
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run([sys.executable, SCRIPT, "--kills", "20"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
