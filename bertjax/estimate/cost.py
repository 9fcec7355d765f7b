"""What a compiled program computes and moves through a device's main memory, loops counted as often as they run.

FLOPs are those of matrix products; what is done beside them, element by element, is bound by memory or hidden.
"""

import dataclasses
import math
import re

from bertjax.estimate.program import CALLERS, Array, Computation, Instruction, Program

# Those whose result is a part of what they read.
_SLICES = ("dynamic-slice", "slice", "gather")
# Those that compute and move nothing, or whose computations are counted for themselves.
_FREE = (
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"),
    *("partition-id", "replica-id", "iota", "add-dependency", "opt-barrier"),
)
# What the TPU compiler writes as a call and is none.
_NO_KERNEL = ("AllocateBuffer", "ConcatBitcast", "AsyncCollectiveStart", "AsyncCollectiveDone", "Sharding")
# Matrix products of [L, K] by [K, L] in kernels of JAX's own, which say nothing of their cost.
_SPLASH_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
_COLLECTIVE = re.compile(r"all-(gather|reduce|to-all)|reduce-scatter|collective-")


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one instruction does in all its repetitions.

    Attributes:
      flops: of matrix products.
      hbm_bytes: read from and written to the main memory.
      times: how often it is carried out.
      source: the operation of the traced function that it came from.
      name: of its result, as the compiler has it.
    """

    flops: float
    hbm_bytes: float
    times: int
    source: str
    name: str = ""


def work_of(program: Program) -> list[StepCost]:
    """Of every instruction that the device carries out one after the other."""
    return [
        StepCost(
            times * _flops(program, computation, instruction),
            times * _hbm_bytes(program, computation, instruction),
            times,
            instruction.source,
            instruction.name,
        )
        for computation, instruction, times in program.scheduled()
        if instruction.opcode not in _FREE
    ]


def _flops(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Of one instruction, once, with all that is inside it."""
    if instruction.opcode == "dot":
        return _dot_flops(computation, instruction)
    if instruction.opcode == "convolution":
        return _convolution_flops(computation, instruction)
    if instruction.opcode == "custom-call":
        return _estimate(instruction, "flops") or _splash_flops(computation, instruction)
    if instruction.opcode in CALLERS:
        return 0.0
    return sum(
        _flops(program, inner, one)
        for name in instruction.called
        for inner in [program.computations[name]]
        for one in inner.instructions.values()
    )


def _splash_flops(computation: Computation, instruction: Instruction) -> float:
    """Of splash attention, of all blocks, those that one direction leaves out included; 0 of anything else."""
    for name, products in _SPLASH_PRODUCTS.items():
        if instruction.name.startswith(name):
            given = (
                array.shape for operand in instruction.operands for array in computation.instructions[operand].arrays
            )
            rows, heads, length, size = next(shape for shape in given if len(shape) == 4)
            return 2.0 * products * rows * heads * length**2 * size
    return 0.0


def _dot_flops(computation: Computation, instruction: Instruction) -> float:
    left = computation.instructions[instruction.operands[0]].arrays[0]
    contracted = instruction.attribute("lhs_contracting_dims", r"\{[\d,]*\}") or "{}"
    sizes = [left.shape[int(axis)] for axis in contracted.strip("{}").split(",") if axis]
    return 2.0 * math.prod(instruction.arrays[0].shape) * math.prod(sizes)


def _convolution_flops(computation: Computation, instruction: Instruction) -> float:
    """2 x output elements x input features x window positions that lie on an element and not on padding.

    The TPU compiler makes convolutions of matrix products, and windows of their batch axes.
    """
    left, right = (computation.instructions[name].arrays[0].shape for name in instruction.operands[:2])
    output = instruction.arrays[0].shape
    left_axes, right_axes, output_axes = re.match(
        r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels", r"[\w\->]+")
    ).groups()
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", instruction.attribute("window", r"\{[^}]*\}") or ""))
    spatial = sorted(axis for axis in output_axes if axis.isdigit())
    positions = math.prod(
        _positions(
            left[left_axes.index(axis)],
            output[output_axes.index(axis)],
            right[right_axes.index(axis)],
            {name: values.split("x")[i] for name, values in window.items()},
        )
        for i, axis in enumerate(spatial)
    )
    features = right[right_axes.index("i")]
    batch, out_features = output[output_axes.index("b")], output[output_axes.index("f")]
    groups = int(instruction.attribute("batch_group_count", r"\d+") or 1)
    return 2.0 * positions * features * batch * out_features / groups


def _positions(given: int, output: int, size: int, window: dict[str, str]) -> int:
    """Pairs of an output position and a window position that meet an element of the input, along one axis."""
    stride, base, dilation = (int(window.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    before = int(window.get("pad", "0_0").split("_")[0])
    dilated = (given - 1) * base + 1
    count = 0
    for at in range(size):
        # output * stride + at * dilation - before, on the dilated input, hits an element at multiples of `base`.
        for out in range(output):
            place = out * stride + at * dilation - before
            count += 0 <= place < dilated and place % base == 0
    return count


def _estimate(instruction: Instruction, name: str) -> float | None:
    """What a kernel's author says that it costs; the compiler knows nothing else of it."""
    found = re.search(rf'"cost_estimate":\{{[^}}]*"{name}":"?([\d.e+]+)', instruction.attributes)
    return float(found[1]) if found else None


def _hbm_bytes(program: Program, computation: Computation, instruction: Instruction) -> float:
    """Of one instruction, once."""
    opcode = instruction.opcode
    if opcode.endswith("-done") or _COLLECTIVE.match(opcode):
        # The exchange itself is counted as such.
        return 0.0
    if opcode == "custom-call":
        if any(name in instruction.attributes for name in _NO_KERNEL):
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
        # A copy between memories: what it reads and what it gives are both among its results.
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
    """How much of a value a fused computation reads: of one that it takes slices of, those."""
    whole = sum(array.size_bytes for array in value.arrays)
    total = 0.0
    for user in computation.users[value.name]:
        if user.opcode in _SLICES and user.operands[0] == value.name:
            total += user.arrays[0].size_bytes
        elif user.opcode == "bitcast":
            total += _read_bytes(program, computation, user)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            # It stays where it is.
            continue
        elif user.opcode == "fusion":
            inner = program.computations[user.called[0]]
            numbers = [number for number, name in enumerate(user.operands) if name == value.name]
            total += sum(_read_bytes(program, inner, inner.parameters[number]) for number in numbers)
        else:
            return whole
    return min(total, whole)


def _written_bytes(program: Program, computation: Computation, root: Instruction, given: tuple[Array, ...]) -> float:
    """How much of its results a fused computation writes: of an array that it changes in place, what it changes."""
    if root.opcode == "tuple":
        parts = [computation.instructions[name] for name in root.operands]
        return sum(
            _written_bytes(program, computation, part, (array,)) for part, array in zip(parts, given, strict=False)
        )
    if root.opcode == "bitcast":
        return _written_bytes(program, computation, computation.instructions[root.operands[0]], given)
    if root.opcode == "fusion":
        inner = program.computations[root.called[0]]
        return _written_bytes(program, inner, inner.instructions[inner.root], given)
    if root.opcode == "dynamic-update-slice":
        return min(computation.instructions[root.operands[1]].arrays[0].size_bytes, _hbm(given))
    return _hbm(given)
