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
from typing import Any

import jax
from jax.experimental import multihost_utils

from bertjax.errors import LOST

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Function to call after every step, evaluation batch and save. Its argument is the time in seconds until the next call
# must follow (default: `config.hang_seconds`; math.inf: no limit).
Heartbeat = Callable[..., None]
_CHECKS_PER_INTERVAL = 20  # checks of the watchdog per `hang_seconds`
# Numbers for JAX's preemption service. It expects consecutive numbers from 1 in all runs of a process, unlike steps.
_sync_points = itertools.count(1)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Handles SIGTERM, SIGINT and SIGHUP while the context is open. After the first signal, SIGINT interrupts at once.

    With several processes, JAX's preemption service handles SIGTERM. It makes all processes stop at the same call.
    Contexts may be nested, as those of a sweep and of its trials: the outer one also gets the signals of the inner one.

    Yields a function to call after each step. It returns whether training should save and stop.
    """
    received: list[int] = []
    is_alone = jax.process_count() == 1

    def handler(number: int, frame: FrameType | None) -> None:
        outer = previous[number]
        is_nested = getattr(outer, "__code__", None) is handler.__code__
        if is_nested:
            outer(number, frame)
        elif received and number == signal.SIGINT:
            raise KeyboardInterrupt
        elif not received:
            # Use os.write, because this handler may interrupt a print(), which is not reentrant.
            with contextlib.suppress(OSError):
                os.write(2, b"stop requested: saving after the next step\n")
        received.append(number)
        if not (is_alone or is_nested):
            os.kill(os.getpid(), signal.SIGTERM)

    # Leave ignored signals alone, such as SIGHUP under `nohup`.
    signals = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    if not is_alone:
        signals.remove(signal.SIGTERM)
    previous: dict[int, Any] = {number: signal.signal(number, handler) for number in signals}

    def stop_requested() -> bool:
        return bool(received) if is_alone else multihost_utils.reached_preemption_sync_point(next(_sync_points))

    try:
        yield stop_requested
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)


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
                    f"bertjax: {process}, the value of config.hang_seconds (stacks above); {fix}",
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
