"""The memory of a compiled program."""

from dataclasses import dataclass

import jax

from hlo.text import HloError


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes on one device while a compiled program runs."""

    arguments: int
    outputs: int
    aliased: int  # outputs in the memory of donated arguments
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """The most bytes allocated at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def memory(compiled: jax.stages.Compiled) -> CompiledMemory:
    """The memory of a compiled program, as XLA reports it. Do not trust the CPU compiler's figures.

    Raises:
        HloError: the backend reports none.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise HloError("this backend does not report the memory of a program")
    return CompiledMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
