"""Ends a process that is alive and gets nowhere: what no exception and no heartbeat tells."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import jax

from bertjax.errors import LOST
from bertjax.utils.terminal import show

_LOOKS = 20


@contextlib.contextmanager
def watchdog(hang_seconds: float) -> Iterator[Callable[[], None]]:
    """Ends this process with exit code 43 where nothing is heard for a time, after printing what each thread is at.

    A process that waits for another one that is stuck is in C++ for ever, where no exception reaches it
    (jax#38503). All of them end, each with its stacks, of which those of the stuck one are different.

    Args:
      hang_seconds: without a call of what is yielded; 0 is for ever.

    Yields:
      A function to call at every sign of progress.
    """
    heard = time.monotonic()
    over = threading.Event()

    def hear() -> None:
        nonlocal heard
        heard = time.monotonic()

    def watch() -> None:
        while not over.wait(hang_seconds / _LOOKS):
            silent = time.monotonic() - heard
            if silent > hang_seconds:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                show(
                    f"bertjax: nothing has happened in process {jax.process_index()} for {silent:,.0f} s, longer than "
                    "config.hang_seconds; above is what its threads are at, the most recent call first. The same "
                    "command on every host goes on from the last checkpoint",
                    sys.stderr,
                )
                os._exit(LOST)

    if hang_seconds:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield hear
    finally:
        over.set()
