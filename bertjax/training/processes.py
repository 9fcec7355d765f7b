"""The processes of a run: how they find each other, and what is said when one is lost."""

import contextlib
import glob
import importlib.util
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import distributed  # The store that its processes share has no public name.

from bertjax.errors import BertjaxError, LostError, first_line
from bertjax.held_back import LOST_PROCESS
from bertjax.settings.cluster import ClusterConfig

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
_ROLL_CALL_SECONDS = 10
_POLL_SECONDS = 0.2
_HOST, _PRESENT, _TOLD = "bertjax/host", "bertjax/present", "bertjax/told"


def is_one_of_several() -> bool:
    """Whether this process was started as one of several, as far as it can tell without asking a network."""
    if any("," in os.environ.get(name, "") for name in _HOSTS) or all(name in os.environ for name in _NAMES):
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


def join_the_others(config: ClusterConfig) -> None:
    """Connects the processes of a run; TPU pods and Slurm tell JAX all it needs, elsewhere three variables do.

    Raises:
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
        if len(given) == len(_NAMES):
            address, count, index = given.values()
            # All is told: JAX would ask a cloud's metadata where libtpu is installed.
            limits["cluster_detection_method"] = "deactivate"
            jax.distributed.initialize(address, int(count), int(index), **limits)
        else:
            jax.distributed.initialize(**limits)
        # While all are here: backends wait half a minute for each other, and reading data may take longer.
        jax.devices()
    except (ValueError, RuntimeError) as error:
        raise BertjaxError(
            f"--distributed found no cluster ({first_line(error)}); off TPU pods and Slurm, set {', '.join(_NAMES)}"
        ) from error
    if jax.process_count() > 1:
        _store().key_value_set(f"{_HOST}/{jax.process_index()}", socket.gethostname())


@contextlib.contextmanager
def naming_a_lost_process() -> Iterator[None]:
    """Makes of the exception with which a collective operation ends, where another process is gone, one for people.

    Raises:
      LostError: another process is gone.
    """
    try:
        yield
    except Exception as error:  # Collectives, and whatever library uses them, raise what they like.
        if not isinstance(error, BertjaxError) and jax.process_count() > 1 and _LOST.search(str(error)):
            raise LostError(LOST_PROCESS.format(f"{_missing()}: {first_line(error)}")) from error
        raise


def _missing() -> str:
    """Which processes do not say that they are still there, when all that are have found one gone."""
    index, count, store = jax.process_index(), jax.process_count(), _store()
    until = time.monotonic() + _ROLL_CALL_SECONDS

    def present(what: str) -> set[int]:
        return {int(key.rpartition("/")[2]) for key, _ in store.key_value_dir_get(what)}

    try:
        store.key_value_set(f"{_PRESENT}/{index}", "")
        hosts = {int(key.rpartition("/")[2]): host for key, host in store.key_value_dir_get(_HOST)}
        while len(there := present(_PRESENT)) < count - 1 and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        store.key_value_set(f"{_TOLD}/{index}", "")
        # The store is gone with process 0.
        while index == 0 and len(present(_TOLD)) < len(there) and time.monotonic() < until + 1:
            time.sleep(_POLL_SECONDS)
    except Exception:  # jaxlib has no class of its own for it.
        return "process 0, which coordinates the others"
    gone = sorted({*range(count)} - there)
    return ", ".join(f"process {number} on {hosts.get(number, 'an unknown host')}" for number in gone) or "unknown"


def _store() -> Any:
    return distributed.global_state.client
