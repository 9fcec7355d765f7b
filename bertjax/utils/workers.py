"""Processes that work for this one, and end with it."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any

from bertjax.errors import BertjaxError
from bertjax.utils.process import REQUESTS


@contextlib.contextmanager
def worker_pool(
    workers: int, lost: Callable[[], BertjaxError], start: Callable[..., object] | None = None, *args: Any
) -> Iterator[Executor]:
    """A process pool.

    Args:
      workers: so many processes.
      lost: what to raise where one of them crashed or was killed.
      start: called with `args` in each process before anything else.
    """
    # Not fork: TensorFlow's threads may run in the parent.
    pool = _Pool(workers, multiprocessing.get_context("spawn"), _start, (start, *args))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise lost() from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Pool(ProcessPoolExecutor):
    """Processes that start with requests to end blocked: Python has a traceback for one that comes before its start."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Started here, since it leaves requests unblocked.
        resource_tracker.ensure_running()
        super().__init__(*args, **kwargs)

    def submit(self, *args: Any, **kwargs: Any) -> Future:
        # Which starts a process where none is idle.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
        try:
            return super().submit(*args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(start: Callable[..., object] | None, *args: Any) -> None:
    """Initialises a worker: interrupts are the parent's to handle, and a worker ends when its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Blocked while Python started.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    if start:
        start(*args)
