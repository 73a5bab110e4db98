"""Reads a compiled program: its collectives, its data movement and its memory.

    compiled = jax.jit(step).lower(*args).compile()
    for c in hlo.collectives(compiled.as_text()):
        print(c.op, c.dtype, c.bytes, c.count, c.sent(local=8))

Trust only programs compiled for CUDA (``zerojax.analysis.aot`` needs no GPU for that): XLA:CPU widens int4
gathers to int8 and bf16 reductions to fp32.
"""

from hlo.collectives import HloCollective, collectives, products
from hlo.host import HostCopy, host_copies
from hlo.memory import CompiledMemory, memory
from hlo.moves import MOVES, Movement, fused_opcodes, movements
from hlo.text import HloError

__all__ = [
    "MOVES",
    "CompiledMemory",
    "HloCollective",
    "HloError",
    "HostCopy",
    "Movement",
    "collectives",
    "fused_opcodes",
    "host_copies",
    "memory",
    "movements",
    "products",
]
