"""The copies between device and host memory in a compiled program."""

from dataclasses import dataclass

from hlo.collectives import until_done
from hlo.text import WRAPPERS, Array, Instruction, Program, callees, parse, walk

_HOST = "S(5)"  # XLA's number of host memory
# Instructions that hand arrays on, and the allocation of a stack.
_PASSIVE = frozenset({"bitcast", "call", "conditional", "custom-call", "get-tuple-element", "opt-barrier"})
_PASSIVE |= {"parameter", "tuple", "while"}


@dataclass(frozen=True)
class HostCopy:
    """An instruction that moves an array, or a slice of one, between the two memories."""

    name: str
    to_host: bool
    bytes: int  # moved per execution
    count: int  # executions per run of the program
    by_dma: bool  # beside kernels; else a kernel of its own, or nothing else meanwhile
    covers: float  # the fraction of its computation's matmuls between its start and its done


def host_copies(text: str) -> tuple[HostCopy, ...]:
    """Every instruction that reads or writes host memory, in scheduled order.

    Copies of whole arrays count with all their bytes; slices, asynchronous or not, with those of the slice.

    Args:
        text: ``compiled.as_text()``.
    """
    program = parse(text)
    found: list[HostCopy] = []
    for visit in walk(program):
        one = visit.instruction
        known = visit.computation.by_name
        reads = any(_HOST in known[name].shape for name in one.operands if name in known)
        if one.opcode in _PASSIVE or one.opcode.endswith("-done") or not (reads or _HOST in one.shape):
            continue
        covers = 0.0
        if one.opcode.endswith("-start"):
            covers = until_done(program, visit.computation, one)[2]
        to_host, moved, by_dma = _moved(program, one)
        found.append(HostCopy(one.name, to_host, moved.bytes, visit.count or 1, by_dma, covers))
    return tuple(found)


def _moved(program: Program, one: Instruction) -> tuple[bool, Array, bool]:
    """Whether an instruction writes to the host, the array that moves, and whether copy engines move it."""
    if one.opcode not in WRAPPERS:
        # The shape of a copy's start is where it writes, and what it reads.
        written = one.shape.partition("}")[0] if one.opcode == "copy-start" else one.shape
        return _HOST in written, one.arrays[0], one.opcode == "copy-start"
    (callee,) = callees(one)
    called = program.computations[callee]
    # What XLA found out about the offset of a slice: in a loop, that it follows from the loop's counter.
    found_out = any("dynamic_slice_config" in part.attributes for part in called.instructions)
    by_dma = one.opcode != "fusion" and found_out
    for part in called.instructions:
        if part.opcode == "dynamic-update-slice" and _HOST in part.shape:
            return True, called.by_name[part.operands[1]].arrays[0], by_dma
    result = called.instructions[-1]
    return _HOST in result.shape, result.arrays[0], by_dma
