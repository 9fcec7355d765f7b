"""Being asked to stop: SIGTERM, SIGHUP, Ctrl-C, or the notice a cluster gives before it takes a machine away."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Catches SIGTERM, SIGHUP and Ctrl-C while it is open; a second Ctrl-C interrupts at once.

    Yields:
      A function of the step just done: whether to save and stop now. All processes of a run get the same answer.
    """
    received: list[int] = []

    def handler(number: int, _frame: Any) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not received:
            # Not print: a handler may run inside another one.
            with contextlib.suppress(OSError, ValueError):
                os.write(sys.stderr.fileno(), b"asked to stop: saving after the next step\n")
        received.append(number)

    def as_sigterm(number: int, _frame: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    # JAX has taken SIGTERM where there are several processes, and lets them agree on a step.
    alone = jax.process_count() == 1
    handlers = dict.fromkeys(_SIGNALS, handler) if alone else {signal.SIGHUP: as_sigterm}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        # `nohup` ignores SIGHUP.
        del handlers[signal.SIGHUP]
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield (lambda step: bool(received)) if alone else multihost_utils.reached_preemption_sync_point
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
