"""What a compiled program holds in memory."""

from dataclasses import dataclass

import jax

from zerojax.analysis.hlo.text import HloError


@dataclass(frozen=True)
class CompiledMemory:
    """Bytes on one device while a compiled program runs."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take over a donated argument's memory
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """The most that is allocated at once."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def memory(compiled: jax.stages.Compiled) -> CompiledMemory:
    """The memory of a compiled program, by XLA's own account. Do not trust the CPU compiler's.

    Raises:
      HloError: the backend keeps no such account.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise HloError("this backend does not say how much memory a program takes")
    return CompiledMemory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )
