"""fp8 with a scale for each block, the published form of DeepSeek-V3, Kimi K2 and Qwen3's FP8 models.

For a tensor NAME of float8_e4m3fn the files have NAME_scale_inv, the factors of its values: one number for
each block of, by default, 128 rows and 128 columns. The last blocks may be smaller.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import BFloat16

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles, Specs, TensorSpec
from zerojax.validation.untrusted import short

_CODES, _SCALES = "F8_E4M3", "_scale_inv"
_SCALE_DTYPES = "F32", "F16", "BF16", "F8_E8M0"


@dataclass(frozen=True)
class FP8Blocks:
    """The format of the files.

    Attributes:
        block: rows and columns that share a scale; None if all elements of a tensor do.
    """

    block: tuple[int, int] | None

    @classmethod
    def of(cls, size: list[Any] | None) -> "FP8Blocks":
        """The format with blocks of this weight_block_size, which must be two positive integers.

        None means one scale for a whole tensor.
        """
        if size is None:
            return cls(None)
        if [type(n) for n in size] != [int, int] or min(size) < 1:
            raise ConfigurationError(f"weight_block_size = {short(size)} should be two positive integers")
        return cls((size[0], size[1]))

    def decoded(self, specs: Specs) -> Specs:
        """The specs of decoded tensors, in bf16, from the specs of the files.

        Raises:
            ConfigurationError: scales are missing, or do not fit their tensor.
        """
        found = dict(specs)
        for name, spec in specs.items():
            if spec.dtype != _CODES:
                continue
            scales = found.pop(name + _SCALES, None)
            if scales is None:
                raise ConfigurationError(f"{name} is in fp8, but the files lack its scales, {name}{_SCALES}")
            if scales.dtype not in _SCALE_DTYPES or scales.shape not in self._scale_shapes(spec):
                size = "one for all" if self.block is None else f"for blocks of {self.block}"
                raise ConfigurationError(f"{name} {spec} and its scales {scales} do not fit: {size}")
            found.pop(f"{name.removesuffix('weight')}activation_scale", None)  # for matmuls in fp8
            found[name] = TensorSpec("BF16", spec.shape)
        return found

    def _scale_shapes(self, spec: TensorSpec) -> tuple[tuple[int, ...], ...]:
        if self.block is None:
            return (), (1,), (1, 1)
        if len(spec.shape) != len(self.block):
            return ()
        return (tuple(-(-n // size) for n, size in zip(spec.shape, self.block, strict=True)),)

    def read(self, files: SafetensorFiles, name: str, *ranges: slice) -> BFloat16[np.ndarray, "..."]:
        """Read a part of a quantized tensor: multiplied in fp32 and rounded to bf16, as in transformers."""
        values = files.read(name, *ranges).astype(np.float32)
        if self.block is None:
            scales = files.read(name + _SCALES).astype(np.float32).reshape(())
        else:
            scales = files.read_repeated(name + _SCALES, self.block, files.specs[name].shape, ranges)
        values *= scales
        return values.astype(ml_dtypes.bfloat16)
