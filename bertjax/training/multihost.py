"""The processes of a run: how they find each other, and what is said when one is lost."""

import contextlib
import glob
import importlib.util
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # The store that its processes share has no public name.

from bertjax.config.mesh import ClusterConfig
from bertjax.errors import LOST, BertjaxError, LostError, UsageError, first_line, quoted
from bertjax.utils.terminal import show

LOST_PROCESS = (
    "another process of this run is gone ({}); when all of them have ended, the same command on every host goes on "
    "from the last checkpoint"
)
_NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_PORT = "JAX_COORDINATOR_PORT"
# JAX's own, 8482, is let through by no rule that Google Cloud makes by itself (jax#35905).
_TPU_PORT = 8476
# Set where a process is one of several: on GKE, for TPU slices that work together, and in a step of Slurm.
_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_COUNTS = (("MEGASCALE_NUM_SLICES", "MEGASCALE_NUM_SLICES"), ("SLURM_NTASKS", "SLURM_PROCID"))
# Said by gloo, which moves data between CPUs, by the service through which JAX coordinates processes, and by the
# libraries that move data between GPUs.
_LOST = re.compile(r"\bgloo\b|\bnccl|coordination ?service|\bheartbeat", re.IGNORECASE)
_BEAT_SECONDS = 2
# In the store: what a process writes under its number, and what one writes for all.
_HOST, _ALIVE, _KNOWS = "bertjax/host", "bertjax/alive", "bertjax/knows"
_LOST_PROCESSES = "bertjax/lost/processes"


def is_one_of_several() -> bool:
    """Whether this process was started as one of several, as far as it can tell without asking a network."""
    if any("," in os.environ.get(name, "") for name in _HOSTS) or any(name in os.environ for name in _NAMES):
        return True
    if any(os.environ.get(count, "1") != "1" and place in os.environ for count, place in _COUNTS):
        return True
    return _has_tpus()


def _has_tpus() -> bool:
    """Whether there are TPUs here; on a TPU VM, JAX asks the machine's metadata for the others."""
    # Where they are not to be used, they are as good as not there.
    if "tpu" not in (os.environ.get("JAX_PLATFORMS") or "tpu") or "TPU_SKIP_MDS_QUERY" in os.environ:
        return False
    if importlib.util.find_spec("libtpu") is None:
        return False
    return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


def initialize_distributed(config: ClusterConfig) -> None:
    """Connects the processes of a run; TPU pods and Slurm tell JAX all it needs, elsewhere three variables do.

    Raises:
      UsageError: what the environment says of them is none, or a part.
      BertjaxError: there are no others, or they do not answer.
    """
    if jax.distributed.is_initialized():
        # By the program that this is called from.
        return
    given = {name: os.environ[name] for name in _NAMES if name in os.environ}
    port = config.coordinator_port or (_TPU_PORT if _has_tpus() else 0)
    if port:
        os.environ.setdefault(_PORT, str(port))
    limits: dict[str, Any] = {
        "initialization_timeout": config.initialization_timeout_seconds,
        "heartbeat_timeout_seconds": config.heartbeat_timeout_seconds,
    }
    try:
        if given:
            address, count, index = _all_told(given)
            # All is told: JAX would ask a cloud's metadata where libtpu is installed.
            limits["cluster_detection_method"] = "deactivate"
            jax.distributed.initialize(address, count, index, **limits)
        else:
            jax.distributed.initialize(**limits)
        # While all are here: backends wait half a minute for each other, and reading data may take longer.
        jax.devices()
    except (ValueError, RuntimeError, LookupError) as error:
        raise BertjaxError(
            f"--distributed found no cluster ({first_line(error)}); off TPU pods and Slurm, set {', '.join(_NAMES)}"
        ) from error
    if jax.process_count() > 1:
        _store().key_value_set(f"{_HOST}/{jax.process_index()}", socket.gethostname())
        threading.Thread(target=_be_alive, daemon=True).start()


def _all_told(given: dict[str, str]) -> tuple[str, int, int]:
    """Address, number of processes and this one's, of variables of the environment.

    Raises:
      UsageError: one is missing, or is none.
    """
    if missing := [name for name in _NAMES if name not in given]:
        raise UsageError(
            f"the environment has {', '.join(given)}, and not {', '.join(missing)}; set all three, in each process of "
            "a run, or none"
        )
    address, count, index = (given[name] for name in _NAMES)
    if not re.fullmatch(r"\S+:\d{1,5}", address):
        raise UsageError(f"{_NAMES[0]} is {quoted(address)}; it must be HOST:PORT of process 0")
    if not re.fullmatch(r"[1-9]\d{0,6}", count):
        raise UsageError(f"{_NAMES[1]} is {quoted(count)}; it must be a number of at least 1")
    if not re.fullmatch(r"\d{1,7}", index) or int(index) >= int(count):
        raise UsageError(f"{_NAMES[2]} is {quoted(index)}; it must be a number from 0 to {int(count) - 1}")
    return address, int(count), int(index)


def tells_of_a_lost_process(error: Exception) -> bool:
    """Whether it is that of a collective operation which another process of the run has left."""
    return not isinstance(error, BertjaxError) and jax.process_count() > 1 and bool(_LOST.search(str(error)))


@contextlib.contextmanager
def naming_a_lost_process() -> Iterator[None]:
    """Makes of the exception with which a collective operation ends, where another process is gone, one for people.

    Raises:
      LostError: another process is gone.
    """
    try:
        yield
    except Exception as error:  # Collectives, and whatever library uses them, raise what they like.
        if tells_of_a_lost_process(error):
            raise LostError(LOST_PROCESS.format(f"{_who_is_gone()}: {first_line(error)}")) from error
        raise


def _who_is_gone() -> str:
    """Which processes are gone, as this one finds or as another has found; the others are told, and end too."""
    index, store = jax.process_index(), _store()
    try:
        if found := _found_by_another():
            _let_others_read()
            return found
        store.key_value_set(f"{_KNOWS}/{index}", "")
        first = _numbers(_ALIVE)
        time.sleep(3 * _BEAT_SECONDS)
        last, hosts = _numbers(_ALIVE), dict(_entries(_HOST))
        # One that has found out may have ended by now.
        silent = {number for number, beats in last.items() if beats == first.get(number)} - {*_numbers(_KNOWS)}
        found = ", ".join(f"process {number} on {hosts[number]}" for number in sorted(silent - {index})) or "unknown"
        with contextlib.suppress(Exception):  # Of one that was quicker to say so.
            store.key_value_set(_LOST_PROCESSES, found)
        found = _found_by_another()
        _let_others_read()
        return found
    except Exception:  # jaxlib has no class of its own for it.
        return "process 0, which coordinates the others"


def _be_alive() -> None:
    """Tells the others now and then that this process is there, and ends it when another one has found one gone.

    A collective operation fails where it waits for a process that is gone, and nowhere else: the others wait for those
    that it failed in, which end.
    """
    index = jax.process_index()
    while True:
        try:
            _store().key_value_increment(f"{_ALIVE}/{index}", 1)
            found = _found_by_another()
        except Exception:  # The store is gone; JAX ends the process then.
            return
        if found:
            _let_others_read()
            show(f"bertjax: {LOST_PROCESS.format(found)}", sys.stderr)
            os._exit(LOST)
        time.sleep(_BEAT_SECONDS)


def _let_others_read() -> None:
    """The store ends with process 0."""
    if jax.process_index() == 0:
        time.sleep(3 * _BEAT_SECONDS)


def _found_by_another() -> str:
    return dict(_store().key_value_dir_get("bertjax/lost")).get(_LOST_PROCESSES, "")


def _entries(folder: str) -> list[tuple[int, str]]:
    """Process to what it wrote."""
    return [(int(key.rpartition("/")[2]), value) for key, value in _store().key_value_dir_get(folder)]


def _numbers(folder: str) -> dict[int, int]:
    return {number: int(value or 0) for number, value in _entries(folder)}


def _store() -> Any:
    return distributed.global_state.client
