"""How long a compiled step takes at least, from what it computes and moves and what a chip can do."""

import dataclasses
from collections.abc import Sequence

from bertjax.estimate.chips import Chip
from bertjax.estimate.collectives import Collective
from bertjax.estimate.cost import StepCost


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds of one step on one device; each is a bound from below.

    Attributes:
      compute: were matrix products all there is.
      memory: were traffic to the main memory all there is.
      device: operations one after the other, each bound by what takes it longest.
      ici: exchange between chips of a slice.
      dcn: exchange between slices.
    """

    compute: float
    memory: float
    device: float
    ici: float
    dcn: float

    @property
    def overlapped(self) -> float:
        """Of a step whose exchange is all hidden behind its operations, as far as it can be."""
        return max(self.device, self.ici, self.dcn)

    @property
    def in_turn(self) -> float:
        """Of a step whose exchange is hidden behind nothing."""
        return self.device + self.ici + self.dcn


# What the figures take for granted; printed with every plan.
ASSUMPTIONS = (
    "operations run one after the other, each at the peak of matrix units or of memory, whichever takes it longer",
    "matrix units are full, though heads of 64 fill half of a unit of 128; vector units and random bits cost nothing",
    "exchange is on rings over all links of a chip; between slices each chip has its share of its host's network",
    "all positions are tokens, of one sequence a row; of training on real rows the MFU counts tokens alone",
    "input, evaluation, checkpoints and restarts take no time",
)


def roofline(work: Sequence[StepCost], exchanged: Sequence[Collective], chip: Chip) -> Roofline:
    """Bounds for one device, which has its part of a chip.

    Args:
      work: of the step.
      exchanged: collectives of the step.
      chip: of the devices.
    """
    flops_per_second = chip.flops_per_second / chip.cores
    bytes_per_second = chip.hbm_bytes_per_second / chip.cores
    moved = {True: 0.0, False: 0.0}
    for one in exchanged:
        moved[one.crosses_slices] += one.times * one.moved_bytes
    dcn = (chip.dcn_bytes_per_second or 0) / chip.cores
    return Roofline(
        compute=sum(one.flops for one in work) / flops_per_second,
        memory=sum(one.hbm_bytes for one in work) / bytes_per_second,
        device=sum(max(one.flops / flops_per_second, one.hbm_bytes / bytes_per_second) for one in work),
        ici=moved[False] / (chip.ici_bytes_per_second / chip.cores),
        dcn=moved[True] / dcn if moved[True] and dcn else 0.0,
    )
