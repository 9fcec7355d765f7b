"""Published figures of TPU generations."""

import dataclasses

from bertjax.model.flops import PEAK_FLOPS

_DOCS = "docs.cloud.google.com/tpu/docs/"
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Figures of one chip.

    Attributes:
      name: generation, as in `--topology v5e:16x16`.
      flops_per_second: dense bfloat16 peak.
      hbm_bytes: memory that the compiler (libtpu 0.0.42) lets a program use.
      ici_bytes_per_second: bandwidth to neighbor chips of a slice, sum of all links.
      dcn_bytes_per_second: share of the host's network between slices; None if not published.
      cores: JAX devices per chip, which share these figures.
      axes: dimensions of the torus.
      source: source of the figures.
    """

    name: str
    flops_per_second: float
    hbm_bytes: float
    ici_bytes_per_second: float
    dcn_bytes_per_second: float | None
    cores: int
    axes: int
    source: str


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
