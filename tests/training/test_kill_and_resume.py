"""Runs the script that kills a training run, as a user would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "kill_and_resume.py"


@pytest.mark.slow
def test_a_run_killed_at_twenty_random_moments_ends_in_the_same_bits():
    # Two devices, not the eight of the other tests, which take turns on the cores of a small machine.
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run([sys.executable, SCRIPT, "--kills", "20"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
