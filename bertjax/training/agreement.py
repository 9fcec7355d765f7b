"""What the processes of a run find out one by one, and act upon together."""

import hashlib
import json
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax._src import distributed  # The store that its processes share has no public name.
from jax.experimental import multihost_utils

from bertjax.config.fields import differences
from bertjax.config.run import PATH_FIELDS
from bertjax.errors import BertjaxError, LostError, UsageError, first_line
from bertjax.training.multihost import tells_of_a_lost_process
from bertjax.utils.io import write_atomic

T = TypeVar("T")
# May be others in each process: where it finds what all have, and how it waits.
_OF_ITS_OWN = tuple(f"config.{name}" for name in ("cluster.", "hang_seconds:", *(f"{field}:" for field in PATH_FIELDS)))
# Of file systems over a network, for what one machine has written to be seen by another.
_SEEN_SECONDS, _LOOK_SECONDS = 90.0, 0.5
# In which processes that fail for the same reason all come to do so.
_FAIL_SECONDS = 60.0
_SHOWN = 5


def check_same_run(told: dict[str, Any]) -> None:
    """Refuses processes that were started for different runs, which would train a mixture of both.

    Args:
      told: what decides a run, in a form that JSON has.

    Raises:
      UsageError: this process, or another, has not what process 0 has.
    """
    if jax.process_count() == 1:
        return
    ours = json.loads(json.dumps(told))
    theirs = json.loads(_of_first(json.dumps(told).encode()))
    changed = [line for line in differences(theirs, ours) if not line.startswith(_OF_ITS_OWN)]

    def check() -> None:
        if changed:
            raise UsageError(
                f"process {jax.process_index()} of this run was started for another one than process 0 "
                f"({'; '.join(changed[:_SHOWN])}); give all the same command and the same data"
            )

    raise_on_all_hosts(check, UsageError("another process of this run was started for another one, and says in what"))


def check_shared(workdir: epath.Path) -> None:
    """Refuses a workdir that is another folder for each process: none would have a whole checkpoint.

    Raises:
      UsageError: a process does not see what process 0 wrote there.
    """
    if jax.process_count() == 1:
        return
    token = _of_first(secrets.token_hex(16).encode()).decode()
    file = workdir / f".shared-{token}"
    if jax.process_index() == 0:
        write_atomic(file, token)

    def check() -> None:
        deadline = time.monotonic() + _SEEN_SECONDS
        while not file.exists():
            if time.monotonic() > deadline:
                raise UsageError(
                    f"process {jax.process_index()} does not see in {workdir} what process 0 wrote there; give a "
                    "workdir that all hosts share, such as gs://BUCKET/RUN"
                )
            time.sleep(_LOOK_SECONDS)

    try:
        raise_on_all_hosts(check, UsageError(f"another process of this run does not see what is written in {workdir}"))
    finally:
        if jax.process_index() == 0:
            file.unlink(missing_ok=True)


def broadcast_from_host0(find: Callable[[], T]) -> T:
    """What process 0 finds, in all processes of a run; where that fails it fails in all.

    Args:
      find: gives what JSON has.

    Raises:
      BertjaxError: what `find` raised in process 0.
    """
    if jax.process_count() == 1:
        return find()
    told: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            told = {"found": find()}
        except BertjaxError as error:
            told = {"error": str(error), "wrong_use": isinstance(error, UsageError)}
    told = json.loads(_of_first(json.dumps(told).encode()))
    if "error" in told:
        raise _in_all((UsageError if told["wrong_use"] else BertjaxError)(told["error"]))
    return told["found"]


def go_on_after(what: str, error: Exception) -> str:
    """The error that ended one of many things, in a line, where all processes of a run can go on with the next.

    They can if all failed alike. If one fails alone, the others wait in a collective operation and learn of it
    only from the store by which processes are coordinated.

    Args:
      what: has failed; a name that is asked about once.

    Raises:
      BertjaxError: it has failed in some of the processes, or otherwise in each.
    """
    text = first_line(error) if isinstance(error, BertjaxError) else f"{type(error).__name__}: {first_line(error)}"
    if jax.process_count() == 1:
        return text
    is_lost = isinstance(error, LostError) or tells_of_a_lost_process(error)
    if _all_say(what, text, wait=not is_lost):
        return text
    if is_lost:
        raise error
    raise BertjaxError(f"{what} failed, and not alike in all processes: {text}") from error


def _all_say(what: str, text: str, wait: bool) -> bool:
    """Whether all processes say the same of something, within a minute; at once without `wait`."""
    store = distributed.global_state.client
    folder = f"bertjax/failed/{hashlib.sha256(what.encode()).hexdigest()}"
    deadline = time.monotonic() + (_FAIL_SECONDS if wait else 0)
    try:
        store.key_value_set(f"{folder}/{jax.process_index()}", text)
        while len(told := dict(store.key_value_dir_get(folder))) < jax.process_count():
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)
    except Exception:  # The store is gone with process 0; jaxlib has no class of its own for it.
        return False
    return len({*told.values()}) == 1


def _of_first(content: bytes) -> bytes:
    """What process 0 gave, in all."""
    lengths = multihost_utils.process_allgather(np.array(len(content)))
    size = int(np.max(lengths))
    padded = np.frombuffer(content.ljust(size, b" "), np.uint8)
    return multihost_utils.broadcast_one_to_all(padded).tobytes().strip()


def raise_on_all_hosts(check: Callable[[], None], elsewhere: BertjaxError) -> None:
    """Runs a check in every process of a run; where it fails in one it fails in all, so that none waits for another.

    Args:
      check: raises a BertjaxError.
      elsewhere: raised where it failed in another process alone.

    Raises:
      BertjaxError: what the check raised, here or elsewhere.
    """
    failure = None
    try:
        check()
    except BertjaxError as error:
        failure = error
    if jax.process_count() > 1:
        if failure is None and np.any(multihost_utils.process_allgather(np.array(False))):
            failure = elsewhere
        elif failure is not None:
            multihost_utils.process_allgather(np.array(True))
    if failure is not None:
        raise _in_all(failure)


def _in_all(error: BertjaxError) -> BertjaxError:
    error.ends_all = jax.process_count() > 1
    return error
