"""Parses the text of a compiled XLA program, as far as needed to know what runs and how often.

``compiled.as_text()`` is the only complete description of a compiled program in JAX. ``parse`` turns it into
computations of instructions, and ``walk`` visits every instruction that runs, with its number of executions
(the product of the trip counts of the loops around it).
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16}
_ARRAY = re.compile(r"([a-z]+[0-9a-z]*)\[([0-9,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) .*->.*\{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = ")
_CALLEES = re.compile(r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


#: Instructions that execute a computation as one.
WRAPPERS = frozenset({"async-start", "fusion", "fusion-start"})


class HloError(ValueError):
    """The text of the program lacks what was asked for."""


@dataclass(frozen=True)
class Array:
    """One array of a shape: its element type as XLA spells it (``s8``, ``bf16``) and its extents."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits per element; sub-byte types are packed on GPUs."""
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        digits = re.match(r"[a-z]+(\d+)", self.dtype)
        if digits is None:
            raise HloError(f"unknown element type {self.dtype!r}")
        return int(digits[1])

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return -(-self.elements * self.bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, tuples flattened."""
        return tuple(
            Array(dtype, tuple(int(d.removeprefix("<=")) for d in dims.split(",") if d))
            for dtype, dims in _ARRAY.findall(self.shape)
        )

    def attribute(self, pattern: str) -> str | None:
        """The first group of a pattern's first match in the attributes, if any."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else None


@dataclass(frozen=True)
class Computation:
    """A named list of instructions, in scheduled order."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by name."""
        return {i.name: i for i in self.instructions}


@dataclass(frozen=True)
class Program:
    """A module: its computations by name, and the name of its entry."""

    computations: Mapping[str, Computation]
    entry: str


@dataclass(frozen=True)
class Visit:
    """An instruction, with the context in which the program runs it."""

    instruction: Instruction
    computation: Computation
    count: int | None  # executions per run of the program; None if XLA does not know
    in_loop: bool
    conditional: bool  # in a branch; ``count`` assumes that it is always taken


def parse(text: str) -> Program:
    """Parse ``compiled.as_text()``.

    Raises:
        HloError: the text is not a compiled module's.
    """
    computations: dict[str, Computation] = {}
    entry = name = None
    lines: list[Instruction] = []
    for line in text.splitlines():
        if name is None:
            if (header := _HEADER.match(line)) and not line.startswith("HloModule"):
                name, lines = header[2], []
                entry = name if header[1] else entry
        elif line.startswith("}"):
            computations[name] = Computation(name, tuple(lines))
            name = None
        elif head := _NAME.match(line):
            lines.append(_instruction(head[1], line[head.end() :]))
    if entry is None:
        raise HloError("no ENTRY computation: this is not the text of a compiled program")
    return Program(computations, entry)


def walk(program: Program) -> Iterator[Visit]:
    """Visit every instruction that a run executes, except those inside ``WRAPPERS``."""
    yield from _walk(program, program.entry, 1, in_loop=False, conditional=False)


def _walk(
    program: Program, name: str, count: int | None, *, in_loop: bool, conditional: bool
) -> Iterator[Visit]:
    computation = program.computations[name]
    for instruction in computation.instructions:
        yield Visit(instruction, computation, count, in_loop, conditional)
        inner, looping, branching = count, in_loop, conditional
        match instruction.opcode:
            case "while":
                trips = trip_count(instruction)
                inner = None if trips is None or count is None else count * trips
                looping = True
            case "conditional":
                branching = True
            case "call":
                pass
            case _:
                continue
        for callee in callees(instruction):
            yield from _walk(program, callee, inner, in_loop=looping, conditional=branching)


def trip_count(loop: Instruction) -> int | None:
    """How often a ``while`` runs its body, if XLA knows."""
    trips = _TRIPS.search(loop.attributes)
    return int(trips[1]) if trips else None


def callees(instruction: Instruction) -> tuple[str, ...]:
    """The names of the computations that an instruction calls."""
    found = _CALLEES.findall(instruction.attributes)
    if branches := _BRANCHES.search(instruction.attributes):
        found += [b.strip().removeprefix("%") for b in branches[1].split(",")]
    return tuple(found)


def _instruction(name: str, rest: str) -> Instruction:
    """Split ``shape opcode(operands), attributes``; shapes may be nested tuples with comments."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    operands = re.findall(r"%([\w.-]+)", rest[opening : closing + 1])
    return Instruction(name, shape, rest[:opening], tuple(operands), rest[closing + 1 :])


def _closing(text: str, opening: int) -> int:
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, opening):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return bracket.start()
    raise HloError(f"unbalanced brackets in {text[:80]!r}")
