"""The processes of a run: how they find each other, and what is said when one is lost."""

import contextlib
import os
import re
from collections.abc import Iterator

import jax

from bertjax.errors import BertjaxError, first_line
from bertjax.held_back import LOST_PROCESS

_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Said by gloo, which moves data between CPUs, and by the service through which JAX coordinates processes.
_LOST = re.compile(r"\bgloo\b|coordination ?service|\bheartbeat", re.IGNORECASE)


def join_the_others() -> None:
    """Connects the processes of a run; TPU pods and Slurm tell JAX all it needs, elsewhere three variables do.

    Raises:
      BertjaxError: there are no others, or they do not answer.
    """
    given = {name: os.environ[name] for name in _NAMES if name in os.environ}
    try:
        if len(given) == len(_NAMES):
            address, count, index = given.values()
            jax.distributed.initialize(address, int(count), int(index))
        else:
            jax.distributed.initialize()
        # While all are here: backends wait half a minute for each other, and reading data may take longer.
        jax.devices()
    except (ValueError, RuntimeError) as error:
        raise BertjaxError(
            f"--distributed found no cluster ({first_line(error)}); off TPU pods and Slurm, set {', '.join(_NAMES)}"
        ) from error


@contextlib.contextmanager
def naming_a_lost_process() -> Iterator[None]:
    """Makes of the exception with which a collective operation ends, where another process is gone, one for people.

    Raises:
      BertjaxError: another process is gone.
    """
    try:
        yield
    except Exception as error:  # Collectives, and whatever library uses them, raise what they like.
        if not isinstance(error, BertjaxError) and jax.process_count() > 1 and _LOST.search(str(error)):
            raise BertjaxError(LOST_PROCESS.format(first_line(error))) from error
        raise
