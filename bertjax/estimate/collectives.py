"""What a compiled program moves between devices."""

import dataclasses
import math
import re

import numpy as np

from bertjax.estimate.program import Array, Instruction, Program

# Bytes that each device sends on a ring, for one byte of the largest array involved, among `size` devices.
_MOVED = {
    "all-gather": lambda size: (size - 1) / size,
    "all-reduce": lambda size: 2 * (size - 1) / size,
    "reduce-scatter": lambda size: (size - 1) / size,
    "all-to-all": lambda size: (size - 1) / size,
    "collective-permute": lambda size: 1.0,
}
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"\{\{[\d,{} ]*\}\}")
_MESH = re.compile(r"mesh\[([^\]]*)\]\s*\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One operation in which devices exchange data.

    Attributes:
      kind: such as `all-gather`.
      arrays: what it gives; of a `reduce-scatter` what it takes.
      groups: numbers of the devices, or slices, that exchange with each other, int [groups, size]; of a permutation,
        [pairs, 2].
      crosses_slices: whether it goes over the network between slices.
      times: how often it is carried out in one run of the program.
      source: the operation of the traced function that it came from.
    """

    kind: str
    arrays: tuple[Array, ...]
    groups: np.ndarray
    crosses_slices: bool
    times: int
    source: str

    @property
    def moved_bytes(self) -> float:
        """Sent by each device, each time, were it a ring."""
        return _MOVED[self.kind](self.groups.shape[1]) * sum(array.size_bytes for array in self.arrays)


def collectives(program: Program, devices: int, slices: int = 1) -> list[Collective]:
    """All collective operations of a program, which has numbers of its own for the devices of each slice.

    Args:
      program: of one device.
      devices: of one slice.
      slices: so many.
    """
    in_order = {computation.name for computation, _, _ in program.scheduled()}
    found: dict[str, Collective] = {}
    for computation, instruction, times in program.carried_out():
        if "_xla_megascale_transfer_type" in instruction.attributes and instruction.opcode == "send":
            found[instruction.name] = _between_slices(program, computation.name, instruction, slices, times)
            continue
        kind = instruction.opcode.removesuffix("-start")
        if kind not in _MOVED:
            continue
        # The TPU compiler's way to write one: a sum of which each device takes its slice.
        scattered = kind == "all-reduce" and "all-reduce-scatter" in computation.name
        # One that runs beside other work is written in each fusion that has a part of it, under one channel.
        channel = instruction.attribute("channel_id", r"\d+")
        name = instruction.name if computation.name in in_order or channel is None else channel
        found[name] = Collective(
            "reduce-scatter" if scattered else kind,
            _payload(program, computation.name, instruction, kind),
            _groups(instruction, devices),
            False,
            max(times, found[name].times if name in found else 0),
            instruction.source,
        )
    return list(found.values())


def _between_slices(program: Program, computation: str, send: Instruction, slices: int, times: int) -> Collective:
    """What is handed to the hosts, which exchange it with those of the other slices (libtpu's Megascale)."""
    kind = send.attribute("_xla_megascale_transfer_type", r'"\w+"').strip('"').lower().replace("_", "-")
    return Collective(
        kind if kind in _MOVED else "collective-permute",
        program.computations[computation].instructions[send.operands[0]].arrays,
        np.arange(slices)[None],
        True,
        times,
        send.source,
    )


def _payload(program: Program, computation: str, instruction: Instruction, kind: str) -> tuple[Array, ...]:
    arrays = tuple(array for array in instruction.arrays if array.shape or len(instruction.arrays) == 1)
    if kind == "reduce-scatter":
        instructions = program.computations[computation].instructions
        return tuple(array for name in instruction.operands for array in instructions[name].arrays)
    if instruction.opcode.endswith("-start") and kind in ("all-gather", "collective-permute"):
        # Its operands come first, its results after them.
        return arrays[len(instruction.operands) :]
    return arrays


def _groups(instruction: Instruction, devices: int) -> np.ndarray:
    attributes = instruction.attributes
    name = "source_target_pairs" if "source_target_pairs=" in attributes else "replica_groups"
    given = attributes.partition(f"{name}=")[2]
    if iota := _IOTA.match(given):
        shape, reshaped, order = (tuple(map(int, part.split(","))) if part else None for part in iota.groups())
        return np.arange(math.prod(reshaped)).reshape(reshaped).transpose(order).reshape(shape)
    if listed := _LISTED.match(given):
        return np.array([[int(i) for i in group.split(",")] for group in re.findall(r"\{([\d, ]+)\}", listed[0])])
    if mesh := _MESH.match(given):
        sizes = {axis: int(size) for axis, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        along = re.findall(r"'([^']+)'", mesh[2])
        names = [*(axis for axis in sizes if axis not in along), *along]
        order = [list(sizes).index(axis) for axis in names]
        return (
            np.arange(devices)
            .reshape(*sizes.values())
            .transpose(order)
            .reshape(-1, math.prod(sizes[axis] for axis in along))
        )
    return np.arange(devices)[None]
