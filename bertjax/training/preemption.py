"""Handling of signals that stop a run, and a watchdog that ends a hanging process."""

import contextlib
import faulthandler
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

from bertjax.errors import LOST

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Function to call after every step, evaluation batch and save. Its argument is the maximum time in seconds until the
# next call (default: `config.hang_seconds`; math.inf: no limit).
Heartbeat = Callable[..., None]
_CHECKS_PER_INTERVAL = 20  # checks of the watchdog per `hang_seconds`
# Counter for JAX's preemption service: consecutive numbers from 1, which continue in the next run of a process.
_sync_points = itertools.count(1)


class _StopHandler:
    """Signal handler that records signals. After the first signal, SIGINT raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._received: list[int] = []
        self._is_alone = jax.process_count() == 1

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self._received:
            # Use os.write, because this handler may interrupt a print(), which is not reentrant.
            with contextlib.suppress(OSError):
                os.write(2, b"stop requested: saving after the next step\n")
        self._received.append(number)
        if not self._is_alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def stop_requested(self) -> bool:
        if self._is_alone:
            return bool(self._received)
        return multihost_utils.reached_preemption_sync_point(next(_sync_points))


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Handles SIGTERM, SIGINT and SIGHUP while the context is open, see `_StopHandler`.

    With several processes, JAX's preemption service handles SIGTERM. It makes all processes stop after the same step.
    Contexts may be nested, such as those of a sweep and its trials. The inner one uses the handler of the outer one.

    Yields a function to call after each step. It returns whether training should save and stop.
    """
    old_handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    outer = next((handler for handler in old_handlers.values() if isinstance(handler, _StopHandler)), None)
    if outer:
        yield outer.stop_requested
        return
    handler = _StopHandler()
    is_alone = jax.process_count() == 1
    # Leave ignored signals alone, such as SIGHUP under `nohup`.
    signals = [
        number
        for number, old_handler in old_handlers.items()
        if old_handler != signal.SIG_IGN and (is_alone or number != signal.SIGTERM)
    ]
    for number in signals:
        signal.signal(number, handler)
    try:
        yield handler.stop_requested
    finally:
        for number in signals:
            signal.signal(number, old_handlers[number])


@contextlib.contextmanager
def watchdog(hang_seconds: float) -> Iterator[Heartbeat]:
    """Exits with code 43 if `hang_seconds` pass without a heartbeat, after printing the stack of every thread.

    Without a watchdog, a process would wait forever for a stuck host (jax#38503). If `hang_seconds` is 0, the watchdog
    is off.
    """
    deadline = time.monotonic() + hang_seconds
    is_closed = threading.Event()

    def heartbeat(seconds: float = hang_seconds) -> None:
        nonlocal deadline
        deadline = time.monotonic() + seconds

    def watch() -> None:
        while not is_closed.wait(hang_seconds / _CHECKS_PER_INTERVAL):
            if time.monotonic() > deadline:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
                process = f"process {jax.process_index()} made no progress for {hang_seconds:,.0f} s"
                fix = "run the same command again on every host to resume from the last checkpoint"
                print(
                    f"bertjax: {process}, the value of config.hang_seconds (stack traces above); {fix}",
                    file=sys.stderr,
                    flush=True,
                )
                # Exit directly, because an exception would not reach a thread that waits in C++.
                os._exit(LOST)

    if hang_seconds:
        threading.Thread(target=watch, daemon=True).start()
    try:
        yield heartbeat
    finally:
        is_closed.set()
