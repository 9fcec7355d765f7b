"""Tests of signals that stop a run, and of the watchdog, which ends a process without heartbeats."""

import os
import signal
import subprocess
import sys
import time

import pytest

from bertjax.training.preemption import stop_requests, watchdog

STUCK = """
import time
from bertjax.training.preemption import watchdog

def wait_for_host():
    time.sleep(60)

with watchdog(2) as heartbeat:
    for _ in range(6):
        time.sleep(0.5)
        heartbeat()
    print("alive", flush=True)
    wait_for_host()
"""


@pytest.mark.ci
def test_process_without_heartbeat_prints_stacks_and_exits_with_43(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    process = subprocess.run([sys.executable, tmp_path / "stuck.py"], capture_output=True, text=True, timeout=60)
    assert process.returncode == 43 and process.stdout == "alive\n"
    *stacks, last = process.stderr.splitlines()
    assert any(line.endswith("in wait_for_host") for line in stacks)
    assert last.startswith("bertjax: process 0 made no progress for 2 s, more than config.hang_seconds")


def test_disabled_or_closed_watchdog_does_not_end_the_process():
    with watchdog(0):
        time.sleep(0.05)
    with watchdog(1):
        pass
    time.sleep(1.5)


def test_second_interrupt_raises_ignored_signals_stay_ignored_and_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop_requested:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) != before and not stop_requested(1)
            os.kill(os.getpid(), signal.SIGINT)
            assert stop_requested(1)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGHUP, previous)
    assert signal.getsignal(signal.SIGTERM) == before
