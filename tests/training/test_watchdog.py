"""Tests of the watchdog, which ends a process without heartbeats."""

import subprocess
import sys
import time

from bertjax.training.preemption import watchdog

STUCK = """
import time
from bertjax.training.preemption import watchdog

def wait_for_host():
    time.sleep(60)

with watchdog(0.4) as heartbeat:
    for _ in range(10):
        time.sleep(0.1)
        heartbeat()
    print("alive", flush=True)
    wait_for_host()
"""


def test_process_without_heartbeat_prints_stacks_and_exits_with_43(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    process = subprocess.run([sys.executable, tmp_path / "stuck.py"], capture_output=True, text=True, timeout=60)
    assert process.returncode == 43 and process.stdout == "alive\n"
    *stacks, last = process.stderr.splitlines()
    assert any(line.endswith("in wait_for_host") for line in stacks)
    assert last.startswith("bertjax: process 0 made no progress for 0 s, more than config.hang_seconds")


def test_disabled_or_closed_watchdog_does_not_end_the_process():
    with watchdog(0):
        time.sleep(0.05)
    with watchdog(0.05):
        pass
    time.sleep(0.2)
