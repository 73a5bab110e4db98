"""Data movement without compute in a compiled program: copies, slices, concatenations, transposes."""

from dataclasses import dataclass

from hlo.text import WRAPPERS, Computation, Instruction, Program, callees, parse, walk

#: Array operations that only move data.
MOVES = frozenset(
    {"concatenate", "copy", "copy-start", "dynamic-slice", "dynamic-update-slice"}
    | {"gather", "pad", "reverse", "slice", "transpose"}
)
_PASSIVE = frozenset({"bitcast", "constant", "get-tuple-element", "parameter", "reshape", "tuple"})


@dataclass(frozen=True)
class Movement:
    """An instruction in a loop that moves a large array and computes nothing."""

    name: str
    ops: tuple[str, ...]  # ("dynamic-slice",), ("transpose", "copy"), ...
    source: str  # the JAX operation that it comes from
    bytes: int  # moved per execution
    count: int | None  # executions per run; None if the loop's trip count is unknown


def movements(text: str, min_bytes: int, *, loops_only: bool = True) -> tuple[Movement, ...]:
    """Copies, slices, concatenations and transposes of at least ``min_bytes``, fused or not.

    A fusion counts if it only moves arrays: one that also converts or decodes is compute. An update in place
    moves the bytes of the update, not of the updated array.

    Args:
        text: ``compiled.as_text()``.
        min_bytes: the smallest size that counts.
        loops_only: look only at the bodies of loops, where a model's layers are.
    """
    program = parse(text)
    found: list[Movement] = []
    for visit in walk(program):
        if visit.in_loop or not loops_only:
            ops, moved = _moved(program, visit.computation, visit.instruction)
            if ops and moved >= min_bytes:
                source = visit.instruction.attribute(r'op_name="([^"]*)"') or ""
                found.append(Movement(visit.instruction.name, ops, source, moved, visit.count))
    return tuple(found)


def fused_opcodes(text: str, source: str) -> set[str]:
    """The opcodes in those fusions outside of loops that compute a JAX operation, named as in ``op_name``."""
    program = parse(text)
    fusions = [v.instruction for v in walk(program) if v.instruction.opcode in WRAPPERS and not v.in_loop]
    return {
        instruction.opcode
        for fusion in fusions
        if fusion.attribute(r'op_name="([^"]*)"') == source
        for name in callees(fusion)
        for instruction in program.computations[name].instructions
    }


def _moved(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[tuple[str, ...], int]:
    """The moves that an instruction consists of, and the bytes of the largest."""
    if instruction.opcode in MOVES:
        return (instruction.opcode,), _move_bytes(computation, instruction)
    if instruction.opcode not in WRAPPERS:
        return (), 0
    (callee,) = callees(instruction)
    fused = program.computations[callee]
    moves = [i for i in fused.instructions if i.opcode in MOVES]
    others = [i for i in fused.instructions if i.opcode not in MOVES | _PASSIVE]
    if not moves or any(array.elements > 1 for i in others for array in i.arrays):
        return (), 0
    return tuple(i.opcode for i in moves), max(_move_bytes(fused, i) for i in moves)


def _move_bytes(computation: Computation, instruction: Instruction) -> int:
    moved = instruction
    if instruction.opcode == "dynamic-update-slice":
        moved = computation.by_name[instruction.operands[1]]
    return moved.arrays[0].bytes
