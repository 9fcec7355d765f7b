"""A compiled program as its text tells it: instructions, and how often each is carried out.

XLA's own `cost_analysis` counts the body of a loop once, whatever its length. The text has all that is needed to count
it right: the loops' lengths, and the shapes of what every instruction reads and writes.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator

# Whose computations are a part of the program's course, and not hidden in one operation.
CALLERS = ("while", "conditional", "call")
# Of the types whose name does not tell.
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_NAMED = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_OPERAND = re.compile(r"%([\w.\-]+)")
_MEMORY = re.compile(r"S\((\d+)\)")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
      dtype: XLA's name of it, such as `bf16`.
      shape: sizes of its axes.
      in_hbm: whether it lies in the device's main memory, and not in a nearer one.
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
      name: of its result.
      opcode: such as `fusion` or `all-gather`.
      arrays: of its result; several of a tuple.
      operands: names of what it reads.
      called: names of the computations in it.
      attributes: the rest of the line.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    attributes: str

    @property
    def number(self) -> int:
        """Of a parameter."""
        return int(self.attributes.partition(")")[0])

    def attribute(self, name: str, pattern: str = r"[\w.\-]+") -> str | None:
        """The value of an attribute; None where there is none of that form."""
        found = re.search(rf"\b{name}=({pattern})", self.attributes)
        return found[1] if found else None

    @property
    def source(self) -> str:
        """The operation of the traced function that it came from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, in order, and the name of the one whose result is the computation's."""

    name: str
    instructions: dict[str, Instruction]
    root: str

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each one's result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self.instructions.values():
            for name in dict.fromkeys(instruction.operands):
                users[name].append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """By number."""
        return {one.number: one for one in self.instructions.values() if one.opcode == "parameter"}


@dataclasses.dataclass(frozen=True)
class Program:
    """All computations by name, and the one that is run."""

    computations: dict[str, Computation]
    entry: str

    @functools.cached_property
    def times(self) -> Counter[str]:
        """How often each computation is carried out when the program is run once."""
        times: Counter[str] = Counter({self.entry: 1})
        for name in self._callers_first():
            for instruction in self.computations[name].instructions.values():
                repeats = self.trips(instruction) if instruction.opcode == "while" else 1
                for called in instruction.called:
                    times[called] += times[name] * repeats
        return times

    def scheduled(self) -> Iterator[tuple[Computation, Instruction, int]]:
        """Instructions that are carried out one after the other, and how often: not those inside fusions."""
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

    def _callers_first(self) -> list[str]:
        order: list[str] = []
        seen: set[str] = set()

        def visit(name: str) -> None:
            if name not in seen:
                seen.add(name)
                for instruction in self.computations[name].instructions.values():
                    for called in instruction.called:
                        visit(called)
                order.append(name)

        visit(self.entry)
        return order[::-1]

    def trips(self, loop: Instruction) -> int:
        """How often the body of a `while` is carried out; one of unknown length counts once."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if known:
            return int(known[1])
        # A scan counts from 0 by 1 while it is below a constant.
        condition = self.computations[loop.attribute("condition", r"%?[\w.\-]+").lstrip("%")]
        compared = condition.instructions[condition.root]
        limits = [self.constant(condition, name) for name in compared.operands]
        found = [limit for limit in limits if limit is not None]
        return found[0] if found and "direction=LT" in self._comparison(compared) else 1

    def constant(self, computation: Computation, name: str) -> int | None:
        """The value of an integer constant of a computation."""
        instruction = computation.instructions[name]
        if instruction.opcode != "constant":
            return None
        found = re.match(r"(-?\d+)$", instruction.attributes.partition(")")[0])
        return int(found[1]) if found else None

    def _comparison(self, instruction: Instruction) -> str:
        """Attributes of a comparison, which may be fused."""
        inner = [self.computations[name] for name in instruction.called]
        return instruction.attributes + "".join(one.instructions[one.root].attributes for one in inner)

    def carried_out(self) -> Iterator[tuple[Computation, Instruction, int]]:
        """Every instruction, with its computation and how often it is carried out."""
        for name, times in self.times.items():
            for instruction in self.computations[name].instructions.values():
                yield self.computations[name], instruction, times


def read_program(text: str) -> Program:
    """The program in XLA's text form (`jax.stages.Compiled.as_text`).

    Raises:
      ValueError: there is none in it.
    """
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
    if not entry:
        raise ValueError("there is no program in the text")
    return Program(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    arrays = tuple(_array(found) for found in _ARRAY.finditer(text[:end]))
    opcode, _, rest = text[end:].lstrip().partition("(")
    close = _closing("(" + rest, 0) - 1
    inside, attributes = rest[:close], rest[close + 1 :]
    called = tuple(
        part.strip().lstrip("%") for found in _CALLED.finditer(attributes) for part in found[1].strip("{}").split(",")
    )
    # A constant's value, a parameter's number.
    leaf = opcode in ("constant", "parameter")
    operands = () if leaf else tuple(_OPERAND.findall(inside))
    return Instruction(name, opcode, arrays, operands, called, inside + ")" + attributes if leaf else attributes)


def _array(found: re.Match[str]) -> Array:
    shape = tuple(int(size.lstrip("<=")) for size in found[2].split(",") if size)
    memory = _MEMORY.search(found[3] or "")
    return Array(found[1], shape, memory is None or memory[1] == "0")


def _closing(text: str, start: int) -> int:
    """Where the parenthesis at `start` closes."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if not depth:
            return i
    raise ValueError(f"a parenthesis is not closed in {text[:80]!r}")
