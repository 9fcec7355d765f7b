"""Worker processes: Ctrl-C, crashes and a killed parent."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from bertjax.errors import BertjaxError
from bertjax.utils.process_pool import process_pool

WORKER_DIED = BertjaxError("gone")


def test_workers_ignore_ctrl_c():
    with process_pool(1, WORKER_DIED) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN


def test_crashed_worker_raises_an_error():
    with pytest.raises(BertjaxError, match="gone"), process_pool(1, WORKER_DIED, partial(os.umask, 0o27)) as pool:
        assert pool.submit(os.umask, 0).result() == 0o27
        pool.submit(signal.raise_signal, signal.SIGSEGV).result()


def test_worker_ends_with_its_parent(tmp_path):
    pid_file = tmp_path / "pid"
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, time, pathlib
from bertjax.errors import BertjaxError
from bertjax.utils.process_pool import process_pool
if __name__ == "__main__":
    with process_pool(1, BertjaxError()) as pool:
        pathlib.Path({str(pid_file)!r}).write_text(str(pool.submit(os.getpid).result()))
        pool.submit(time.sleep, 600).result()
""")
    parent = subprocess.Popen([sys.executable, script])
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not Path(f"/proc/{pid_file.read_text()}").exists())


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
