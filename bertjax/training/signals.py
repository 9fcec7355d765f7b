"""Being asked to stop: SIGTERM, Ctrl-C, or the notice a cluster gives before it takes a machine away."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Catches SIGTERM and Ctrl-C while it is open; a second Ctrl-C interrupts at once.

    Yields:
      A function of the step just done: whether to save and stop now. All processes of a run get the same answer.
    """
    received: list[int] = []

    def handler(number: int, _frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not received:
            # Not print: a handler may run inside another one.
            os.write(2, b"asked to stop: saving after the next step\n")
        received.append(number)

    if jax.process_count() > 1:
        # JAX has taken SIGTERM, and lets the processes agree on a step.
        yield multihost_utils.reached_preemption_sync_point
        return
    previous = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda step: bool(received)
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
