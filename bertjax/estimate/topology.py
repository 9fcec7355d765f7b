"""Devices of a TPU topology for the TPU compiler, on a machine without a TPU."""

import importlib.util
import math
import os
import re

import jax

from bertjax.errors import BertjaxError, UsageError, first_line
from bertjax.estimate.chips import CHIPS, Chip


def use_tpu_compiler() -> None:
    """Configures JAX for the TPU compiler without a TPU. Call it before JAX initializes its backends."""
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError("`bertjax plan` needs the TPU compiler; install it with pip install 'bertjax[tpu]'")
    # Without a TPU there is no metadata server, and several processes may load libtpu.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    jax.config.update("jax_platforms", "cpu")


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as `v5e:16x16`; raises a UsageError for an invalid topology."""
    name, _, sizes = topology.partition(":")
    if name not in CHIPS or not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", sizes):
        raise UsageError(
            f"invalid --topology {topology[:40]!r}; write GENERATION:SIZE such as v5e:16x16, with one of "
            f"{', '.join(CHIPS)}"
        )
    if sizes.count("x") + 1 != CHIPS[name].axes:
        raise UsageError(f"invalid --topology {topology}; a topology of {name} has {CHIPS[name].axes} sizes")
    return CHIPS[name]


def chips_in(topology: str) -> int:
    """Returns the number of chips of one slice."""
    return math.prod(int(size) for size in topology.partition(":")[2].split("x"))


def tpu_devices(topology: str, slices: int) -> list[jax.Device]:
    """Returns the devices of `slices` slices, to compile for.

    Raises:
      UsageError: libtpu does not know the topology.
      BertjaxError: libtpu cannot be used.
    """
    from jax.experimental import topologies

    # By default libtpu makes the two cores of a v4 chip two devices.
    options = {"chip_config_name": "megacore"} if chip_of(topology).name == "v4" else {}
    if slices > 1:
        options["num_slices"] = slices
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        if "INVALID_ARGUMENT" in str(error):
            raise UsageError(f"unknown --topology {topology}: {first_line(error)}") from error
        raise BertjaxError(f"the TPU compiler cannot be used: {first_line(error)}") from error
