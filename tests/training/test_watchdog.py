"""A process that gets nowhere ends itself, and says what it was at."""

import subprocess
import sys
import time

from bertjax.training.watchdog import watchdog

STUCK = """
import time
from bertjax.training.watchdog import watchdog

def waits_for_another():
    time.sleep(60)

def command():
    with watchdog(0.4) as hear:
        for _ in range(10):
            time.sleep(0.1)
            hear()
        print("alive", flush=True)
        waits_for_another()

command()
"""


def test_a_process_that_hangs_prints_its_stacks_and_ends_for_a_new_start(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    ended = subprocess.run([sys.executable, tmp_path / "stuck.py"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 43
    assert ended.stdout == "alive\n"
    *stacks, last = ended.stderr.splitlines()
    assert any(line.endswith("in waits_for_another") for line in stacks)
    assert last.startswith("bertjax: nothing has happened in process 0 for 0 s, longer than config.hang_seconds")


def test_one_that_is_off_or_over_ends_nothing():
    with watchdog(0):
        time.sleep(0.05)
    with watchdog(0.05):
        pass
    time.sleep(0.2)
