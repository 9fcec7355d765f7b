"""FLOPs of matrix products and main-memory traffic of a compiled program, with every loop iteration counted."""

import dataclasses
import math
import re

import numpy as np
from hlo_program import CALLERS, Array, Computation, Instruction, Program

# Instructions that read only the part of the operand that they return.
_SLICES = ("dynamic-slice", "slice", "gather")
# Instructions that move no data, or whose computations are counted separately.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"),
    *("partition-id", "replica-id", "iota", "add-dependency", "opt-barrier"),
)
# Targets of custom calls that are not kernels.
_NOT_KERNELS = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone", "Sharding")
_COLLECTIVE = re.compile(r"all-(gather|reduce|to-all)|reduce-scatter|collective-")


@dataclasses.dataclass(frozen=True)
class InstructionCost:
    """Cost of all executions of an instruction.

    Attributes:
      flops: FLOPs of matrix products.
      hbm_bytes: bytes read from and written to main memory.
      times: execution count.
      source: name of the traced JAX operation.
    """

    flops: float
    hbm_bytes: float
    times: int
    source: str


def instruction_costs(program: Program) -> list[InstructionCost]:
    """Returns the costs of all scheduled instructions."""
    return [
        InstructionCost(
            times * _flops(program, computation, instruction),
            times * _hbm_bytes(program, computation, instruction),
            times,
            instruction.source,
        )
        for computation, instruction, times in program.scheduled()
        if instruction.opcode not in _FREE
    ]


def _flops(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Returns the FLOPs of one execution, including called computations."""
    if instruction.opcode == "dot":
        return _dot_flops(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if instruction.opcode == "custom-call":
        return _estimate(instruction, "flops") or 0.0
    if instruction.opcode in CALLERS:
        return 0.0
    return sum(
        _flops(program, inner, each)
        for name in instruction.called
        for inner in [program.computations[name]]
        for each in inner.instructions.values()
    )


def _dot_flops(computation: Computation, instruction: Instruction) -> float:
    left = computation.instructions[instruction.operands[0]].arrays[0]
    contracted = instruction.attribute("lhs_contracting_dims", r"\{[\d,]*\}") or "{}"
    sizes = [left.shape[int(axis)] for axis in contracted.strip("{}").split(",") if axis]
    return 2.0 * math.prod(instruction.arrays[0].shape) * math.prod(sizes)


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """Returns 2 x output elements x input features x window positions that are not on padding.

    The TPU compiler writes matrix products as convolutions whose windows are the batch axes.
    """
    left, right = (computation.instructions[name].arrays[0].shape for name in instruction.operands[:2])
    output = instruction.arrays[0].shape
    left_axes, right_axes, output_axes = re.match(
        r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels", r"[\w\->]+")
    ).groups()
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attribute("window", r"\{[^}]*\}") or ""))
    positions = 1
    for i, axis in enumerate(sorted(axis for axis in output_axes if axis.isdigit())):
        sizes = (left[left_axes.index(axis)], output[output_axes.index(axis)], right[right_axes.index(axis)])
        positions *= _positions(*sizes, {name: values.split("x")[i] for name, values in window.items()})
    features = right[right_axes.index("i")]
    batch, out_features = output[output_axes.index("b")], output[output_axes.index("f")]
    groups = int(instruction.attribute("batch_group_count", r"\d+") or 1)
    return 2.0 * positions * features * batch * out_features / groups


def _positions(inputs: int, output: int, size: int, window: dict[str, str]) -> int:
    """Counts the pairs of output and window position along one axis that read an input element, not padding."""
    stride, base, dilation = (int(window.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(window.get("pad", "0_0").split("_")[0])
    places = np.arange(output)[:, None] * stride + np.arange(size) * dilation - before
    # The dilated input has elements only at multiples of `base`.
    return int(np.sum((places >= 0) & (places <= (inputs - 1) * base) & (places % base == 0)))


def _estimate(instruction: Instruction, name: str) -> float | None:
    """Returns a field of a Pallas kernel's cost estimate, or None."""
    found = re.search(rf'"cost_estimate":\{{[^}}]*"{name}":"?([\d.e+]+)', instruction.attributes)
    return float(found[1]) if found else None


def _hbm_bytes(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Returns the main-memory traffic of one execution."""
    opcode = instruction.opcode
    if opcode.endswith("-done") or _COLLECTIVE.match(opcode):
        return 0.0
    if opcode == "custom-call":
        if any(name in instruction.attributes for name in _NOT_KERNELS):
            return 0.0
        estimate = _estimate(instruction, "bytes_accessed")
        if estimate is not None:
            return estimate
    if opcode == "fusion":
        return _fusion_bytes(program, computation, instruction)
    operands = [computation.instructions[name].arrays for name in instruction.operands]
    if opcode in _SLICES or opcode == "slice-start":
        read = _hbm(instruction.arrays[-1:]) if operands and _hbm(operands[0]) else 0
        return read + _hbm(instruction.arrays[:1] if opcode != "slice-start" else ())
    if opcode == "dynamic-update-slice":
        return 2 * _hbm(operands[1])
    if opcode.endswith("-start"):
        # The results of an asynchronous copy include its source and its destination.
        return _hbm(tuple(array for array in instruction.arrays if array.shape))
    return sum(map(_hbm, operands)) + _hbm(instruction.arrays)


def _hbm(arrays: tuple[Array, ...]) -> int:
    return sum(array.size_bytes for array in arrays if array.in_hbm)


def _fusion_bytes(program: Program, computation: Computation, instruction: Instruction) -> float:
    inner = program.computations[instruction.called[0]]
    total = 0.0
    for number, name in enumerate(instruction.operands):
        arrays = computation.instructions[name].arrays
        if _hbm(arrays) and number in inner.parameters:
            total += min(_read_bytes(program, inner, inner.parameters[number]), _hbm(arrays))
    return total + _written_bytes(program, inner, inner.instructions[inner.root], instruction.arrays)


def _read_bytes(program: Program, computation: Computation, value: Instruction) -> float:
    """Returns the bytes of a value that a fused computation reads; for a sliced value, only the slices."""
    whole = sum(array.size_bytes for array in value.arrays)
    total = 0.0
    for user in computation.users[value.name]:
        if user.opcode in _SLICES and user.operands[0] == value.name:
            total += user.arrays[0].size_bytes
        elif user.opcode == "bitcast":
            total += _read_bytes(program, computation, user)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            # An in-place update does not read the array that it updates.
            continue
        elif user.opcode == "fusion":
            inner = program.computations[user.called[0]]
            numbers = [number for number, name in enumerate(user.operands) if name == value.name]
            total += sum(_read_bytes(program, inner, inner.parameters[number]) for number in numbers)
        else:
            return whole
    return min(total, whole)


def _written_bytes(program: Program, computation: Computation, root: Instruction, results: tuple[Array, ...]) -> float:
    """Returns the bytes that a fused computation writes; for an array updated in place, only the update."""
    if root.opcode == "tuple":
        parts = [computation.instructions[name] for name in root.operands]
        return sum(
            _written_bytes(program, computation, part, (array,)) for part, array in zip(parts, results, strict=False)
        )
    if root.opcode == "bitcast":
        return _written_bytes(program, computation, computation.instructions[root.operands[0]], results)
    if root.opcode == "fusion":
        inner = program.computations[root.called[0]]
        return _written_bytes(program, inner, inner.instructions[inner.root], results)
    if root.opcode == "dynamic-update-slice":
        return min(computation.instructions[root.operands[1]].arrays[0].size_bytes, _hbm(results))
    return _hbm(results)
