"""fp8 with a scale for each block, the published form of DeepSeek-V3, Kimi K2 and Qwen3's FP8 models.

For a tensor NAME of float8_e4m3fn the files have NAME_scale_inv, the factors of its values: one number for
each block of, by default, 128 rows and 128 columns. The last blocks may be smaller.

Exports write powers of two as factors: the smallest with which the block's largest magnitude is at most 448.
An optimizer's step then changes few factors, and the product of code and factor is exact.
"""

from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes
import numpy as np
from jaxtyping import Array, BFloat16, Float32, Shaped

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.mapping import Tensor
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles, Specs, TensorSpec
from zerojax.validation.untrusted import short

_CODES = "F8_E4M3"
SCALES = "_scale_inv"
"""The end of the name of a tensor of factors."""
_SCALE_DTYPES = "F32", "F16", "BF16", "F8_E8M0"

EXPONENTS = -100, 120
"""Bounds of the exponents of factors. Subnormal numbers become codes of zero, also where chips flush them."""


@dataclass(frozen=True)
class FP8Blocks:
    """The format of the files.

    Attributes:
        block: rows and columns that share a scale; None if all elements of a tensor do. Exports need blocks.
    """

    block: tuple[int, int] | None

    @property
    def format(self) -> str:
        """The name of the format in options."""
        return "fp8-blocks"

    @property
    def block_shape(self) -> tuple[int, int]:
        """(outputs, inputs) that share a scale."""
        assert self.block is not None
        return self.block

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
            scales = found.pop(name + SCALES, None)
            if scales is None:
                raise ConfigurationError(f"{name} is in fp8, but the files lack its scales, {name}{SCALES}")
            if scales.dtype not in _SCALE_DTYPES or scales.shape not in self._scale_shapes(spec):
                size = "one for all" if self.block is None else f"for blocks of {self.block}"
                raise ConfigurationError(f"{name} {spec} and its scales {scales} do not fit: {size}")
            found.pop(f"{name.removesuffix('weight')}activation_scale", None)  # for matmuls in fp8
            found[name] = TensorSpec("BF16", spec.shape)
        return found

    def check(self, tensor: Tensor) -> None:
        """Refuse a tensor of experts, and one whose blocks have elements of several weights.

        Raises:
            ConfigurationError: names the tensor.
        """
        part, count, height = tensor.part, tensor.columns.stop - tensor.columns.start, self.block_shape[0]
        is_last = part.first + count == tensor.outputs
        if (
            part.expert is not None
            or part.step != 1
            or part.first % height
            or (count % height and not is_last)
        ):
            raise ConfigurationError(
                f"{tensor.name} has experts, or shares blocks of {height} outputs with another weight. Leave "
                "--weights out"
            )

    def specs(self, name: str, spec: TensorSpec) -> Specs:
        """The tensors of a file that encode one tensor."""
        (scales,) = self._scale_shapes(spec)
        return {name: TensorSpec(_CODES, spec.shape), name + SCALES: TensorSpec("F32", scales)}

    def encode(
        self, name: str, values: Float32[np.ndarray, "outputs inputs"], spec: TensorSpec
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Encode one tensor, or whole blocks of its rows, as the tensors of a file.

        Raises:
            ConfigurationError: a weight is not finite.
        """
        if not np.isfinite(values).all():
            raise ConfigurationError(f"{name} holds numbers that are not finite. Leave --weights out")
        (height, width), (outputs, inputs) = self.block_shape, values.shape
        padded = np.pad(np.abs(values), ((0, -outputs % height), (0, -inputs % width)))
        blocks = padded.reshape(len(padded) // height, height, -1, width)
        exponents = self.exponents(blocks.max((1, 3)).view(np.int32))
        whole = exponents.repeat(height, 0)[:outputs].repeat(width, 1)[:, :inputs]
        codes = np.ldexp(values, -whole).astype(ml_dtypes.float8_e4m3fn)
        return {name: codes, name + SCALES: np.ldexp(np.float32(1), exponents)}

    @staticmethod
    def exponents[A: (np.ndarray, Array)](largest: A) -> A:
        """The exponents of the factors of blocks, from the fp32 bits of their largest magnitudes, int32."""
        # 448 is 1.75 * 2^8.
        return cast(A, ((largest >> 23) - 135 + ((largest & 0x7FFFFF) > 0x600000)).clip(*EXPONENTS))

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The ``quantization_config`` of config.json; ``ignored`` names linear modules of full precision."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(self.block_shape),
            "modules_to_not_convert": ignored,
        }

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
            scales = files.read(name + SCALES).astype(np.float32).reshape(())
        else:
            scales = files.read_repeated(name + SCALES, self.block, files.specs[name].shape, ranges)
        values *= scales
        return values.astype(ml_dtypes.bfloat16)
