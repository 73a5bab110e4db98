"""The collectives of a compiled program: their sizes, groups and counts."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hlo.groups import Groups, parse_groups, parse_pairs
from hlo.text import (
    WRAPPERS,
    Computation,
    HloError,
    Instruction,
    Program,
    Visit,
    callees,
    parse,
    trip_count,
    walk,
)

_COMPUTES = frozenset({"convolution", "custom-call", "dot", "fusion", "fusion-start"})
_OPS = frozenset({"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"})
_UNSUPPORTED = frozenset({"collective-broadcast", "ragged-all-to-all", "recv", "send"})


@dataclass(frozen=True)
class HloCollective:
    """One array sent by a collective; a combined collective yields one of these per array."""

    op: str  # "all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"
    name: str
    source: str  # the JAX operation that it comes from, as in the profiler
    dtype: str  # as XLA spells it: "s8", "bf16", ...
    elements: int  # of the whole payload on one device, see ``bytes``
    bytes: int  # of the larger side: an all-gather's result, else the operand
    groups: Groups  # of positions in mesh.devices.flat; a permute's are (source, target)
    count: int  # executions per run of the program
    conditional: bool  # in a branch of a conditional, counted as if always taken
    hides_behind: int  # compute instructions between its start and its done; 0 when synchronous
    covers: float  # the fraction of its computation's matmuls between the two

    def crosses_nodes(self, local: int) -> bool:
        """Whether it crosses nodes; node n holds positions ``n * local`` to ``(n + 1) * local - 1``."""
        return any(len({p // local for p in group}) > 1 for group in self.groups)

    def sent(self, local: int) -> tuple[float, float]:
        """Bytes that one device sends per run of the program, times ``count``.

        Gathers and reductions count as rings in the order of the group, in which each device sends (g-1)/g
        of the payload to the next; an all-reduce counts as a reduce-scatter and an all-gather. An all-to-all
        sends each peer its g-th part.

        Args:
            local: devices per node.

        Returns:
            (to devices of the same node, to other nodes), averaged over the devices.
        """
        inside = between = 0.0
        for group in self.groups:
            for source, target, part in self._transfers(group):
                if source // local == target // local:
                    inside += part * self.bytes
                else:
                    between += part * self.bytes
        devices = len({p for group in self.groups for p in group})
        return inside * self.count / devices, between * self.count / devices

    def _transfers(self, group: tuple[int, ...]) -> list[tuple[int, int, float]]:
        """(source, target, fraction of the payload) of every message of a group."""
        size = len(group)
        if self.op == "collective-permute":
            return [(group[0], group[1], 1.0)] if group[0] != group[1] else []
        if self.op == "all-to-all":
            return [(s, t, 1 / size) for s in group for t in group if s != t]
        rounds = 2 if self.op == "all-reduce" else 1
        ring = zip(group, group[1:] + group[:1], strict=True)
        return [(s, t, rounds * (size - 1) / size) for s, t in ring if s != t]


def collectives(text: str) -> tuple[HloCollective, ...]:
    """Every collective of a compiled program, in scheduled order.

    Asynchronous pairs count once, loops multiply, and combined collectives are split into their arrays.

    Args:
        text: ``compiled.as_text()``.

    Raises:
        HloError: the text is not a compiled program, or a collective is of an unsupported kind or in a loop
            of unknown trip count.
    """
    program = parse(text)
    devices = _devices(text)
    found: list[HloCollective] = []
    for visit in walk(program):
        for instruction in _parts(program, visit.instruction):
            op = instruction.opcode.removesuffix("-start")
            if op in _UNSUPPORTED:
                raise HloError(f"{instruction.name}: {op} is not supported")
            if op in _OPS:
                found += _split(program, visit, instruction, op, devices)
    return tuple(found)


def products(text: str) -> int:
    """How many matmuls a run of the program executes; those of branches and calls are not counted."""
    program = parse(text)
    return _matmuls(program, program.computations[program.entry])


def _parts(program: Program, instruction: Instruction) -> tuple[Instruction, ...]:
    """The instructions that one executes: itself, or those it wraps.

    Collectives over NVLink may be fused, as may matmuls with the slices that they read and write.
    """
    if instruction.opcode not in WRAPPERS:
        return (instruction,)
    return tuple(i for c in callees(instruction) for i in program.computations[c].instructions)


def _split(
    program: Program, visit: Visit, instruction: Instruction, op: str, devices: int
) -> list[HloCollective]:
    if visit.count is None:
        raise HloError(f"{instruction.name} is in a loop of unknown trip count")
    arrays, hides_behind, covers = instruction.arrays, 0, 0.0
    if visit.instruction.opcode.endswith("-start"):
        done, hides_behind, covers = until_done(program, visit.computation, visit.instruction)
        if instruction is visit.instruction:
            arrays = done.arrays
    if op == "collective-permute":
        groups = parse_pairs(instruction.attributes)
    else:
        groups = parse_groups(instruction.attributes, devices)
    # The result has the shape of the payload, except for a reduce-scatter, which keeps one part of it.
    parts = len(groups[0]) if op == "reduce-scatter" else 1
    source = instruction.attribute(r'op_name="([^"]*)"') or ""
    return [
        HloCollective(
            op, instruction.name, source, array.dtype, array.elements * parts,
            array.bytes * parts, groups, visit.count, visit.conditional, hides_behind, covers,
        )
        for array in arrays
    ]  # fmt: skip


def until_done(
    program: Program, computation: Computation, start: Instruction
) -> tuple[Instruction, int, float]:
    """The instruction that ends an asynchronous one, and the compute between the two.

    As a number of instructions, and as the fraction of all matmuls of the computation; a loop counts as all
    of its iterations.
    """
    has_matmul = partial(_has_matmul, program)
    position = computation.instructions.index(start)
    computes = matmuls = 0
    for later in computation.instructions[position + 1 :]:
        if start.name in later.operands and later.opcode.endswith("-done"):
            every = _matmuls(program, computation)
            return later, computes, matmuls / every if every else 0.0
        computes += _count(program, later, lambda i: i.opcode in _COMPUTES)
        matmuls += _count(program, later, has_matmul)
    raise HloError(f"{start.name} does not end in the computation that starts it")


def _matmuls(program: Program, computation: Computation) -> int:
    """The number of matmuls that a computation executes, its loops included."""
    return sum(_count(program, i, partial(_has_matmul, program)) for i in computation.instructions)


def _count(program: Program, instruction: Instruction, kind: Callable[[Instruction], bool]) -> int:
    """The number of instructions of a kind that an instruction executes; unknown trip counts are 1."""
    if instruction.opcode != "while":
        return int(kind(instruction))
    body = program.computations[instruction.attribute(r"body=%?([\w.-]+)") or ""].instructions
    trips = trip_count(instruction)
    return (1 if trips is None else trips) * sum(_count(program, inner, kind) for inner in body)


def _has_matmul(program: Program, instruction: Instruction) -> bool:
    return any(
        part.opcode == "dot" or (part.opcode == "custom-call" and "cublas" in part.attributes)
        for part in _parts(program, instruction)
    )


def _devices(text: str) -> int:
    """The number of devices of the program, from its first line."""
    header = text.partition("\n")[0]
    return math.prod(map(int, re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", header)))
