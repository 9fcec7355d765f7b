"""TPU generations: what a chip of each can do, as its maker says, and the memory that its compiler grants."""

import dataclasses

from bertjax.model.flops import PEAK_FLOPS

_PAGE = "docs.cloud.google.com/tpu/docs/"


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation.

    Attributes:
      name: in a topology such as `v5e:16x16`, and in what is printed.
      flops_per_second: dense bf16 peak.
      hbm_bytes: main memory, less what the compiler (libtpu 0.0.42) keeps from programs.
      hbm_bytes_per_second: to and from it.
      ici_bytes_per_second: that a chip sends to its neighbours, over all links together.
      dcn_bytes_per_second: a chip's share of the network between slices; None where no figure is published.
      cores: devices that JAX sees, which share the figures above.
      axes: of its torus.
      source: of the figures.
    """

    name: str
    flops_per_second: float
    hbm_bytes: float
    hbm_bytes_per_second: float
    ici_bytes_per_second: float
    dcn_bytes_per_second: float | None
    cores: int
    axes: int
    source: str


_GIB = 2**30
_PEAKS = dict(PEAK_FLOPS)
_LINKS_V2_V3 = "links: Norrie et al., IEEE Micro 41(2), 2021, 4 x {} Gbit/s each way"
CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            *("v2", 2 * _PEAKS["TPU v2"], 2 * 7.48 * _GIB, 700e9, 4 * 62e9, None, 2, 2),
            f"{_PAGE}v2; {_LINKS_V2_V3.format(496)}",
        ),
        Chip(
            *("v3", 2 * _PEAKS["TPU v3"], 2 * 15.48 * _GIB, 900e9, 4 * 82e9, None, 2, 2),
            f"{_PAGE}v3; {_LINKS_V2_V3.format(656)}",
        ),
        Chip(
            *("v4", _PEAKS["TPU v4"], 30.75 * _GIB, 1200e9, 6 * 50e9, None, 1, 3),
            f"{_PAGE}v4; links: Jouppi et al., ISCA 2023, 6 x 50 GB/s each way",
        ),
        Chip("v5e", _PEAKS["TPU v5e"], 15.75 * _GIB, 819e9, 200e9, 25e9 / 8, 1, 2, f"{_PAGE}v5e"),
        Chip("v5p", _PEAKS["TPU v5p"], 95.74 * _GIB, 2765e9, 600e9, 50e9 / 8, 1, 3, f"{_PAGE}v5p"),
        Chip("v6e", _PEAKS["TPU v6"], 31.25 * _GIB, 1638e9, 400e9, 100e9 / 8, 1, 2, f"{_PAGE}v6e"),
    )
}
