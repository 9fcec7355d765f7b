"""Multi-process runs: connects processes, broadcasts values of host 0, and raises errors on all hosts."""

import atexit
import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from bertjax.config.fields import differences
from bertjax.config.mesh import ClusterConfig
from bertjax.config.run import PATH_FIELDS
from bertjax.errors import INTERRUPTED, BertjaxError, LostError, UnavailableError, UsageError, first_line, shortened
from bertjax.utils.io import write_atomic
from bertjax.utils.terminal import exit_at_once

T = TypeVar("T")
_PROCESS_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Google Cloud's default firewall rules allow this port, but not JAX's default port 8482 (jax#35905).
_DEFAULT_PORT = 8476
_SHUTDOWN_SECONDS = 3600
# Words in the messages of failed collectives: gloo on CPUs, NCCL on GPUs, JAX's coordination service, Orbax's barriers.
_COLLECTIVE_ERROR = re.compile(r"\bgloo\b|\bnccl|coordination ?service|\bheartbeat|\bbarrier", re.IGNORECASE)
# Config fields that may differ between processes: paths, timeouts and ports.
_LOCAL_FIELDS = ("config.cluster.", "config.hang_seconds:", *(f"config.{field}:" for field in PATH_FIELDS))
# Maximum seconds to wait for a new file. On a network file system, a host may see it only after its cache expires.
_VISIBLE_SECONDS, _POLL_SECONDS = 90.0, 0.5


def is_multihost_environment() -> bool:
    """Returns True if environment variables of JAX, GKE, multi-slice TPUs or Slurm describe several processes."""
    variables = os.environ
    return (
        any(name in variables for name in _PROCESS_VARIABLES)
        or any("," in variables.get(name, "") for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"))
        or variables.get("MEGASCALE_NUM_SLICES", "1") != "1"
        # Without SLURM_PROCID, the process is in a Slurm allocation but was not started by `srun`.
        or ("SLURM_PROCID" in variables and variables.get("SLURM_NTASKS", "1") != "1")
    )


def initialize_distributed(config: ClusterConfig) -> None:
    """Connects the processes of a run with `jax.distributed.initialize`.

    JAX detects the processes on TPU pods, GKE and Slurm. On other clusters, the environment variables
    JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID describe them.
    """
    if jax.distributed.is_initialized():
        return
    if config.coordinator_port or "SLURM_JOB_ID" not in os.environ:  # On Slurm, JAX derives the port from the job ID.
        os.environ.setdefault("JAX_COORDINATOR_PORT", str(config.coordinator_port or _DEFAULT_PORT))
    options: dict[str, Any] = {
        "initialization_timeout": config.initialization_timeout_seconds,
        "heartbeat_timeout_seconds": config.heartbeat_timeout_seconds,
        # At exit, all processes wait for process 0, which may still be computing the task's baseline.
        "shutdown_timeout_seconds": _SHUTDOWN_SECONDS,
    }
    values = [os.environ.get(name, "") for name in _PROCESS_VARIABLES]
    try:
        if any(values):
            address, count, index = values
            options |= {"coordinator_address": address, "num_processes": int(count), "process_id": int(index)}
            # Disable cluster detection, which queries the cloud's metadata server if libtpu is installed.
            options["cluster_detection_method"] = "deactivate"
            # Reject invalid values here, because JAX would first wait for `initialization_timeout`.
            if ":" not in address or not 0 <= int(index) < int(count):
                raise ValueError("invalid values")
        jax.distributed.initialize(**options)
        # Create the backends before reading data, because the hosts wait only 30 s for each other's backends.
        jax.devices()
    except (ValueError, RuntimeError, LookupError) as error:
        shown = ", ".join(f"{name}={shortened(value)}" for name, value in zip(_PROCESS_VARIABLES, values, strict=True))
        raise BertjaxError(
            f"could not connect the processes: {first_line(error)}; outside TPU pods and Slurm, set environment "
            f"variables to HOST:PORT of process 0, the number of processes and the process index (now: {shown})"
        ) from error


@contextlib.contextmanager
def raise_on_all_hosts() -> Iterator[None]:
    """If the block raises a BertjaxError on any process, raises that error on all processes at the end of the block.

    Otherwise, the other processes would wait for the failed process forever.
    """
    if jax.process_count() == 1:
        yield
        return
    failure: BertjaxError | None = None
    try:
        yield
    except BertjaxError as error:
        failure = error
    text = f"process {jax.process_index()}: {shortened(failure, 500)}" if failure else ""
    classes = (UsageError, UnavailableError, BertjaxError)
    number = 1 + next(index for index, each in enumerate(classes) if isinstance(failure, each)) if failure else 0
    message = np.frombuffer(text.encode()[:1024].ljust(1024), np.uint8)
    numbers, texts = multihost_utils.process_allgather((np.array(number), message))
    if np.any(numbers):
        first = int(np.argmax(numbers != 0))
        error = classes[numbers[first] - 1](np.asarray(texts[first]).tobytes().decode(errors="replace").strip())
        error.on_all_hosts = True
        raise error from failure


def broadcast_from_host0(read: Callable[[], T]) -> T:
    """Runs `read` on process 0 and returns its result, a JSON value, on all processes."""
    if jax.process_count() == 1:
        return read()
    content = b""
    with raise_on_all_hosts():
        if jax.process_index() == 0:
            content = json.dumps(read()).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.array(len(content))))
    array = np.frombuffer(content.ljust(size), np.uint8)
    return json.loads(multihost_utils.broadcast_one_to_all(array).tobytes())


def assert_same_run(description: dict[str, Any]) -> None:
    """Raises a UsageError on all processes if the run description of any process differs from that of process 0.

    `description` contains the config and hashes of the data as JSON values. Paths, timeouts and ports may differ.
    """
    # Convert tuples to lists, because process 0 broadcasts its description as JSON, which has no tuples.
    description = json.loads(json.dumps(description))
    expected = broadcast_from_host0(lambda: description)
    with raise_on_all_hosts():
        changes = differences(expected, description)
        if changed := [line for line in changes if not line.startswith(_LOCAL_FIELDS)]:
            message = f"config or data differ from those of process 0: {'; '.join(changed[:5])}"
            raise UsageError(f"{message}; start all processes with the same command and data")


def assert_shared_workdir(workdir: epath.Path) -> None:
    """Raises a UsageError on all processes if a process does not see the files that process 0 writes to the workdir."""
    if jax.process_count() == 1:
        return
    probe = workdir / f".shared-{broadcast_from_host0(lambda: secrets.token_hex(16))}"
    if jax.process_index() == 0:
        write_atomic(probe, "")
    deadline = time.monotonic() + _VISIBLE_SECONDS
    try:
        with raise_on_all_hosts():
            while not probe.exists():
                if time.monotonic() > deadline:
                    raise UsageError(f"workdir is not shared between hosts: {workdir}; use a shared folder or gs://...")
                time.sleep(_POLL_SECONDS)
    finally:
        if jax.process_index() == 0:
            probe.unlink(missing_ok=True)


def is_collective_error(error: BaseException) -> bool:
    """Returns True if an error means that a collective failed because another process has died."""
    is_foreign = not isinstance(error, BertjaxError) and jax.process_count() > 1
    return is_foreign and _COLLECTIVE_ERROR.search(str(error)) is not None


@contextlib.contextmanager
def exit_on_host_error() -> Iterator[None]:
    """Skips JAX's shutdown barrier at exit if the block raises an error that only some hosts may have raised.

    In the barrier, this process would wait for other processes, which wait for this one in a collective. If a
    collective failed because another process has died, raises a LostError.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if jax.process_count() == 1 or getattr(error, "on_all_hosts", False):
            raise
        is_lost = is_collective_error(error)
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        # This handler runs after the error is printed and before JAX's exit handler.
        atexit.register(exit_at_once, LostError.exit_code if is_lost else code)
        if not is_lost:
            raise
        message = f"another process of this run has died: {first_line(error)}"
        raise LostError(f"{message}; run the same command again on every host to resume") from error
