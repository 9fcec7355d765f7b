"""The chips of a TPU that is not here, for the TPU compiler, which is."""

import importlib.util
import math
import os
import re
import signal
import threading

import jax

from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.estimate.chips import CHIPS, Chip

_EXAMPLE = "v5e:16x16"


def use_tpu_compiler() -> None:
    """Makes ready for the TPU compiler on a machine without a TPU; call it before JAX looks for devices.

    Raises:
      UsageError: it is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError("`bertjax plan` needs the TPU compiler: pip install 'bertjax[tpu]'; no TPU is needed")
    # No machine's metadata is asked for, and another process may use the compiler too.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")


def chip_of(topology: str) -> Chip:
    """The generation of a topology such as `v5e:16x16`.

    Raises:
      UsageError: there is none of that name or form.
    """
    name, _, sizes = topology.partition(":")
    if name not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", sizes):
        raise UsageError(
            f"--topology is {topology[:40]!r}; write GENERATION:SIZE such as {_EXAMPLE}, of {', '.join(CHIPS)}"
        )
    if sizes.count("x") + 1 != CHIPS[name].axes:
        raise UsageError(f"--topology is {topology}; a topology of {name} has {CHIPS[name].axes} sizes")
    return CHIPS[name]


def chips_in(topology: str) -> int:
    """How many chips a slice of a topology has."""
    return math.prod(int(size) for size in topology.partition(":")[2].split("x"))


def tpu_devices(topology: str, slices: int) -> list[jax.Device]:
    """Devices to compile for, of so many slices.

    Raises:
      UsageError: there is no such topology.
      BertjaxError: the compiler cannot be used.
    """
    from jax.experimental import topologies

    chip = chip_of(topology)
    # Two cores of a v4 chip are one device, unless told otherwise.
    config = {"chip_config_name": "megacore"} if chip.name == "v4" else {}
    if slices > 1:
        config["num_slices"] = slices
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **config)
        return list(found.devices)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" in str(error):
            raise UsageError(f"there is no topology {topology} ({first_line(error)})") from error
        raise BertjaxError(f"the TPU compiler cannot be used ({first_line(error)})") from error
    finally:
        # libtpu has SIGHUP ignored, by all that is started here too.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
