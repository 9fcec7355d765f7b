"""Processes that work for this one: they end when asked, with their parent, and with one error where they crash."""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bertjax.errors import BertjaxError
from bertjax.utils import workers
from bertjax.utils.workers import worker_pool


def lost() -> BertjaxError:
    return BertjaxError("gone")


def test_workers_start_with_requests_to_end_blocked_and_obey_them_once_they_can(monkeypatch):
    blocked = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, [])
    with worker_pool(1, lost) as pool:
        assert not pool.submit(blocked).result()
    monkeypatch.setattr(workers, "_start", id)
    with worker_pool(1, lost) as pool:
        assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP} <= pool.submit(blocked).result()
    assert not blocked()


def test_a_crash_in_a_worker_is_an_error_here():
    with pytest.raises(BertjaxError, match="gone"), worker_pool(1, lost, os.nice, 0) as pool:
        assert pool.submit(os.nice, 0).result() == 0
        pool.submit(signal.raise_signal, signal.SIGSEGV).result()


def test_a_worker_ends_with_its_parent(tmp_path):
    kept = tmp_path / "worker"
    program = f"""
import os, time, pathlib
from bertjax.errors import BertjaxError
from bertjax.utils.workers import worker_pool
if __name__ == "__main__":
    with worker_pool(1, BertjaxError) as pool:
        pathlib.Path({str(kept)!r}).write_text(str(pool.submit(os.getpid).result()))
        pool.submit(time.sleep, 600).result()
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    parent = subprocess.Popen([sys.executable, script])
    try:
        until(lambda: kept.exists() and kept.read_text())
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not Path(f"/proc/{kept.read_text()}").exists())


def until(done) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)
