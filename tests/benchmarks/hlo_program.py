"""Parser of HLO text: instructions of a compiled program and their execution counts.

XLA's `cost_analysis` counts the body of a loop only once, but the HLO text contains the trip counts of loops.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator

# Instructions whose computations are scheduled instruction by instruction, unlike the body of a fusion.
CALLERS = ("while", "conditional", "call")
# Bit widths of HLO types whose names do not contain them.
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_NAMED = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OPERAND = re.compile(r"%([\w.\-]+)")
# Text in parentheses, with up to two nested levels, as for layouts such as `{1,0:T(8,128)S(1)}` in a tuple.
_GROUP = r"\([^()]*(?:\([^()]*(?:\([^()]*\)[^()]*)*\)[^()]*)*\)"
_INSTRUCTION = re.compile(rf"({_GROUP}|\S+) ([\w\-]+)\(((?:[^()]|{_GROUP})*)\)(.*)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
      dtype: HLO type, such as `bf16`.
      shape: axis sizes.
      in_hbm: whether it is in main memory, not in on-chip memory.
    """

    dtype: str
    shape: tuple[int, ...]
    in_hbm: bool = True

    @property
    def size_bytes(self) -> int:
        bits = _BITS[self.dtype] if self.dtype in _BITS else int(re.search(r"\d+", self.dtype)[0])
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: name of the result.
      opcode: opcode, such as `fusion` or `all-gather`.
      arrays: arrays of the result; several for a tuple.
      operands: names of the operands.
      called: names of the called computations.
      inside: text of the operands; the value of a constant, or the index of a parameter.
      attributes: rest of the line.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    inside: str
    attributes: str

    def attribute(self, name: str, pattern: str = r"[\w.\-]+") -> str | None:
        """Returns the value of an attribute, or None."""
        match = re.search(rf"\b{name}=({pattern})", self.attributes)
        return match[1] if match else None

    @property
    def source(self) -> str:
        """Name of the traced JAX operation."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order, and the name of the root instruction."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Users of each instruction's result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users[name].append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by index."""
        return {int(one.inside): one for one in self.instructions.values() if one.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Program:
    """Computations by name, and the name of the entry computation."""

    computations: dict[str, Computation]
    entry: str

    @functools.cached_property
    def times(self) -> Counter[str]:
        """Number of executions of each computation per run of the program."""
        times: Counter[str] = Counter()

        def add(name: str, count: int) -> None:
            times[name] += count
            for instruction in self.computations[name].instructions.values():
                repeats = self.trips(instruction) if instruction.opcode == "while" else 1
                for called in instruction.called:
                    add(called, count * repeats)

        add(self.entry, 1)
        return times

    def scheduled(self) -> Iterator[tuple[Computation, Instruction, int]]:
        """Yields the instructions outside fusions, with their computation and execution count."""
        pending, seen = [self.entry], set()
        while pending:
            computation = self.computations[pending.pop()]
            if computation.name in seen:
                continue
            seen.add(computation.name)
            for instruction in computation.instructions.values():
                yield computation, instruction, self.times[computation.name]
                if instruction.opcode in CALLERS:
                    pending += instruction.called

    def trips(self, loop: Instruction) -> int:
        """Returns the trip count of a `while`; 1 if unknown."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if known:
            return int(known[1])
        # A scan's counter goes from 0 in steps of 1 to a constant.
        condition = self.computations[loop.attribute("condition", r"%?[\w.\-]+").lstrip("%")]
        compared = condition.instructions[condition.root]
        operands = [condition.instructions[name] for name in compared.operands]
        limits = [int(each.inside) for each in operands if each.opcode == "constant" and each.inside.isdigit()]
        # The comparison may be inside a fusion.
        inner = [self.computations[name] for name in compared.called]
        roots = [compared, *(each.instructions[each.root] for each in inner)]
        return limits[0] if limits and any("direction=LT" in each.attributes for each in roots) else 1

    def executed(self) -> Iterator[tuple[Computation, Instruction, int]]:
        """Yields every instruction with its computation and execution count."""
        for name, times in self.times.items():
            for instruction in self.computations[name].instructions.values():
                yield self.computations[name], instruction, times


def read_program(text: str) -> Program:
    """Parses HLO text (`jax.stages.Compiled.as_text`)."""
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if not line.startswith(" "):
            header = _HEADER.match(line)
            if header:
                name, instructions, root = header[2], {}, ""
                entry = name if header[1] else entry
            elif line == "}":
                computations[name] = Computation(name, instructions, root or next(reversed(instructions)))
            continue
        named = _NAMED.match(line)
        if named:
            instructions[named[1]] = _instruction(named[1], line[named.end() :])
            root = named[1] if line.lstrip().startswith("ROOT ") else root
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    result, opcode, inside, attributes = _INSTRUCTION.fullmatch(text).groups()
    arrays = tuple(
        Array(dtype, tuple(map(int, re.findall(r"\d+", sizes))), not re.search(r"S\([1-9]", layout))
        for dtype, sizes, layout in _ARRAY.findall(result)
    )
    called = tuple(
        part.strip().lstrip("%") for match in _CALLED.findall(attributes) for part in match.strip("{}").split(",")
    )
    return Instruction(name, opcode, arrays, tuple(_OPERAND.findall(inside)), called, inside, attributes)
