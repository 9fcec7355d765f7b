"""A process that gets nowhere ends itself, and says what it was at."""

import os
import subprocess
import sys
import time

from bertjax.training.watchdog import watchdog

STUCK = """
import time
from bertjax.utils import process
from bertjax.training.watchdog import watchdog

def waits_for_another():
    time.sleep(60)

def command():
    with TemporaryDirectory() as folder, watchdog(0.4) as hear:
        print(folder, flush=True)
        for _ in range(10):
            time.sleep(0.1)
            hear()
        print("alive", flush=True)
        waits_for_another()

process.run(command, debug=False)
"""


def test_a_process_that_hangs_prints_its_stacks_and_ends_for_a_new_start(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    ended = subprocess.run([sys.executable, tmp_path / "stuck.py"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 43
    folder, alive = ended.stdout.splitlines()
    assert alive == "alive"
    *stacks, last = ended.stderr.splitlines()
    assert any(line.endswith("in waits_for_another") for line in stacks)
    assert last.startswith("bertjax: nothing has happened in process 0 for 0 s, longer than config.hang_seconds")
    assert not os.path.exists(folder)


def test_one_that_is_off_or_over_ends_nothing():
    with watchdog(0):
        time.sleep(0.05)
    with watchdog(0.05):
        pass
    time.sleep(0.2)
