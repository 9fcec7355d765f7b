"""Published specifications of TPU chips, and devices of a topology for compilation without a TPU."""

import dataclasses
import importlib.util
import math
import os
import re
from typing import Any

import jax

from bertjax.errors import UsageError, first_line, quoted
from bertjax.model.flops import PEAK_FLOPS

_DOCS = "docs.cloud.google.com/tpu/docs/"
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Specifications of a TPU chip. Chips of v2 and v3 have two JAX devices."""

    name: str  # generation, such as `v5e` in `--topology v5e:16x16`
    flops_per_second: float  # peak dense bfloat16 FLOP/s
    hbm_bytes: float  # memory that the compiler (libtpu 0.0.42) makes available to a program
    ici_bytes_per_second: float  # total bandwidth of all links to neighboring chips of a slice
    dcn_bytes_per_second: float | None  # the chip's share of its host's bandwidth between slices (None: not published)
    cores: int  # number of JAX devices per chip
    axes: int  # number of dimensions of a slice's torus network
    source: str  # source of the specifications


_PEAKS = dict(PEAK_FLOPS)
_V2_V3_LINKS = f"{_DOCS}v{{}}; links: Norrie et al., IEEE Micro 41(2), 2021"
_V4_LINKS = f"{_DOCS}v4; links: Jouppi et al., ISCA 2023"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v2", 2 * _PEAKS["TPU v2"], 2 * 7.48 * _GIB, 4 * 62e9, None, 2, 2, _V2_V3_LINKS.format(2)),
        Chip("v3", 2 * _PEAKS["TPU v3"], 2 * 15.48 * _GIB, 4 * 82e9, None, 2, 2, _V2_V3_LINKS.format(3)),
        Chip("v4", _PEAKS["TPU v4"], 30.75 * _GIB, 6 * 50e9, None, 1, 3, _V4_LINKS),
        Chip("v5e", _PEAKS["TPU v5e"], 15.75 * _GIB, 200e9, 25e9 / 8, 1, 2, f"{_DOCS}v5e"),
        Chip("v5p", _PEAKS["TPU v5p"], 95.74 * _GIB, 600e9, 50e9 / 8, 1, 3, f"{_DOCS}v5p"),
        Chip("v6e", _PEAKS["TPU v6"], 31.25 * _GIB, 400e9, 100e9 / 8, 1, 2, f"{_DOCS}v6e"),
    )
}


def use_tpu_compiler() -> None:
    """Configures JAX for the TPU compiler without a TPU. Call it before JAX initializes its backends."""
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError("`bertjax plan` needs the TPU compiler; install it with pip install 'bertjax[tpu]'")
    # Without a TPU, there is no metadata server to query, and it is safe for several processes to load libtpu.
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    # Without these variables, libtpu logs errors about the missing TPU. Their values do not change the topology to
    # compile for.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    jax.config.update("jax_platforms", "cpu")


def chip_of(topology: str) -> Chip:
    """Returns the chip of a topology such as `v5e:16x16`. Raises a UsageError for an invalid topology."""
    name, _, size = topology.partition(":")
    chip = CHIPS.get(name)
    if chip is None or not re.fullmatch(r"[1-9]\d*" + r"x[1-9]\d*" * (chip.axes - 1), size):
        example = "x".join(["4"] * chip.axes) if chip else "SIZE"
        raise UsageError(
            f"invalid --topology {quoted(topology)}; use {name if chip else 'GENERATION'}:{example}, such as v5e:16x16 "
            f"or v4:4x4x4, with one of the generations {', '.join(CHIPS)}"
        )
    return chip


def chips_in(topology: str) -> int:
    """Returns the number of chips of one slice."""
    return math.prod(int(size) for size in topology.partition(":")[2].split("x"))


def tpu_devices(topology: str, slices: int) -> list[jax.Device]:
    """Returns the devices of all slices as compilation targets; no TPU is needed."""
    from jax.experimental import topologies

    # Represent the two cores of a v4 chip as one device (megacore). By default, libtpu makes a device of each core.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if chip_of(topology).name == "v4" else {}
    if slices > 1:
        options["num_slices"] = slices
    if chips_in(topology) == 1:  # By default, libtpu expects hosts with four chips.
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise UsageError(f"the TPU compiler rejects --topology {topology}: {first_line(error)}") from error
