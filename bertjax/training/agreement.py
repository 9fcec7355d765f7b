"""What the processes of a run find out one by one, and act upon together."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from bertjax.errors import BertjaxError


def check_together(check: Callable[[], None]) -> None:
    """Runs a check in every process of a run; where it fails in one it fails in all, so that none waits for another.

    Raises:
      BertjaxError: what the check raised, here or elsewhere.
    """
    failure = None
    try:
        check()
    except BertjaxError as error:
        failure = error
    if jax.process_count() > 1 and failure is None:
        others = np.flatnonzero(multihost_utils.process_allgather(np.array(False)))
        if others.size:
            raise BertjaxError(f"process {others[0]} of this run found its data damaged, and says where")
    elif jax.process_count() > 1:
        multihost_utils.process_allgather(np.array(True))
    if failure is not None:
        raise failure
