"""Stop requests: SIGTERM, SIGHUP and Ctrl-C end training after the current step, with a checkpoint."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[int], bool]]:
    """Handles SIGTERM, SIGINT and SIGHUP while the context is open; a second SIGINT raises KeyboardInterrupt.

    With several processes, JAX's preemption service owns SIGTERM and makes all processes stop at the same step.

    Yields:
      A function from the step that was just finished to True if training should save and stop now.
    """
    received: list[int] = []
    is_alone = jax.process_count() == 1

    def handler(number: int, _frame: FrameType | None) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not received:
            # Not print(): the handler may interrupt another print().
            with contextlib.suppress(OSError):
                os.write(2, b"stop requested: saving after the next step\n")
        received.append(number)
        if not is_alone:
            os.kill(os.getpid(), signal.SIGTERM)

    # `nohup` ignores SIGHUP.
    signals = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    if not is_alone:
        signals.remove(signal.SIGTERM)
    previous = {number: signal.signal(number, handler) for number in signals}
    try:
        yield (lambda _step: bool(received)) if is_alone else multihost_utils.reached_preemption_sync_point
    finally:
        for number, old_handler in previous.items():
            signal.signal(number, old_handler)
