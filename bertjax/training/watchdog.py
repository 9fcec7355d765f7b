"""Watchdog of a run: ends a process that makes no progress, such as one that waits for a stuck host (jax#38503)."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from bertjax.errors import LOST

_CHECKS_PER_INTERVAL = 20


@contextlib.contextmanager
def watchdog(hang_seconds: float) -> Iterator[Callable[[], None]]:
    """Prints the stack of every thread and exits with code 43 if there is no heartbeat for `hang_seconds`.

    Args:
      hang_seconds: longest time without a heartbeat (0: no limit).

    Yields:
      The heartbeat: a function to call after every step, evaluation batch and save.
    """
    last_heartbeat = time.monotonic()
    is_closed = threading.Event()

    def heartbeat() -> None:
        nonlocal last_heartbeat
        last_heartbeat = time.monotonic()

    def watch() -> None:
        while not is_closed.wait(hang_seconds / _CHECKS_PER_INTERVAL):
            seconds = time.monotonic() - last_heartbeat
            if seconds > hang_seconds:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                message = (
                    f"bertjax: process {jax.process_index()} made no progress for {seconds:,.0f} s, more than "
                    "config.hang_seconds; the stacks of its threads are above. Run the same command again on every "
                    "host to resume from the last checkpoint"
                )
                print(message, file=sys.stderr, flush=True)
                # An exception would not reach a thread that waits in C++.
                os._exit(LOST)

    if hang_seconds:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield heartbeat
    finally:
        is_closed.set()
