"""Quantized weights in compressed-tensors, the format of vLLM and transformers.

``pallas_kernels`` makes the codes and scales, so weights decode bit for bit as with zerojax's codec. Integers
are "pack-quantized": ``weight_packed`` holds code + 2^(bits-1) in words of 32 bits, the first element lowest.
fp8 is "naive-quantized": ``weight`` is float8_e4m3fn. ``weight_scale`` has one number per block, in bf16 for
bf16 models and otherwise in fp32, which holds the codec's bf16 exactly.
"""

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped, UInt8

import pallas_kernels
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.mapping import Tensor
from zerojax.interop.huggingface.safetensors_files import DTYPES, SafetensorFiles, Specs, TensorSpec

Format = Literal["int8", "int4", "int2", "fp8"]
Direction = Literal["input", "output"]

_WORD = 32  # bits; this many columns always fill whole words


@dataclass(frozen=True)
class WeightFormat:
    """The quantization of a model's linear layers.

    Attributes:
        format: format of the codes.
        block: elements that share a scale.
        along: "input": a block is inputs of one output, as in compressed-tensors' groups. "output": a block
            is outputs of one input, as ZeRO++ sends a kernel in training.
    """

    format: Format
    block: int
    along: Direction = "input"

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return pallas_kernels.BITS[self.format]

    @property
    def packed(self) -> bool:
        """Whether codes are packed into words."""
        return self.format != "fp8"

    @property
    def block_shape(self) -> tuple[int, int]:
        """(outputs, inputs) that share a scale."""
        return (1, self.block) if self.along == "input" else (self.block, 1)

    def check(self, tensor: Tensor) -> None:
        """Refuse a tensor that does not divide into blocks.

        Raises:
            ConfigurationError: names the tensor and an option to change.
        """
        if tensor.part.expert is not None:
            raise ConfigurationError(
                f"{tensor.name} is a matrix of one expert. transformers reads all experts of a layer into "
                "one tensor, which compressed-tensors does not quantize. Leave --weights out"
            )
        height, width = self.block_shape
        inputs, outputs = tensor.weight[0], len(range(tensor.weight[1])[tensor.columns])
        if outputs % height or inputs % width:
            extent = inputs if self.along == "input" else outputs
            raise ConfigurationError(
                f"{tensor.name} has {extent} {self.along}s, which do not divide into blocks of {self.block}. "
                "Choose another --block-size, or the other direction with --along"
            )

    def specs(self, name: str, spec: TensorSpec) -> dict[str, TensorSpec]:
        """The tensors of a file that encode one tensor."""
        height, width = self.block_shape
        outputs, inputs = spec.shape
        scale = TensorSpec("BF16" if spec.dtype == "BF16" else "F32", (outputs // height, inputs // width))
        if not self.packed:
            return {name: TensorSpec("F8_E4M3", spec.shape), f"{name}_scale": scale}
        words = -(-inputs * self.bits // _WORD)
        return {
            f"{name}_packed": TensorSpec("I32", (outputs, words)),
            f"{name}_scale": scale,
            f"{name}_shape": TensorSpec("I64", (2,)),
        }

    def encode(
        self, name: str, values: Float32[np.ndarray, "outputs inputs"], spec: TensorSpec
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Encode one tensor, or some of its rows, as the tensors of a file.

        Raises:
            ConfigurationError: a weight is not finite.
        """
        rows = values if self.along == "input" else values.T
        payload = np.asarray(pallas_kernels.encode(np.ascontiguousarray(rows), self.format, block=self.block))
        size = rows.shape[1] * self.bits // 8
        scales = np.ascontiguousarray(payload[:, size:]).view(ml_dtypes.bfloat16)
        if not np.isfinite(scales.astype(np.float32)).all():
            raise ConfigurationError(
                f"{name} holds numbers that are not finite, or too large for {self.format}. Leave --weights "
                "out"
            )
        codes = _unpack(payload[:, :size], self.bits)
        if self.along == "output":
            codes, scales = codes.T, scales.T
        scale = scales.astype(DTYPES[self.specs(name, spec)[f"{name}_scale"].dtype])
        if not self.packed:
            return {name: np.ascontiguousarray(codes).view(ml_dtypes.float8_e4m3fn), f"{name}_scale": scale}
        offset = codes ^ np.uint8(1 << (self.bits - 1))  # two's complement + 2^(bits-1)
        return {
            f"{name}_packed": _pack(offset, self.bits),
            f"{name}_scale": scale,
            f"{name}_shape": np.array(spec.shape, np.int64),
        }

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The ``quantization_config`` of config.json; ``ignored`` names linear modules of full precision."""
        grouping: dict[str, Any] = {"strategy": "group", "group_size": self.block}
        if self.along == "output":
            grouping = {"strategy": "block", "block_structure": list(self.block_shape)}
        weights = {"num_bits": self.bits, "type": "int" if self.packed else "float", "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized" if self.packed else "naive-quantized",
            "quantization_status": "compressed",
            "ignore": ignored,
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {**weights, "dynamic": False, **grouping}}
            },
        }

    def decoded(self, specs: Specs) -> Specs:
        """The specs of decoded tensors, fp32 where quantized, from the specs of the files."""
        height, width = self.block_shape
        found: Specs = {}
        for name, spec in specs.items():
            base, _, kind = name.rpartition("_")
            if name.endswith("_scale"):
                found[base] = TensorSpec("F32", (spec.shape[0] * height, spec.shape[1] * width))
            elif kind not in ("packed", "shape") and f"{name}_scale" not in specs:
                found[name] = spec
        return found

    def read(
        self, files: SafetensorFiles, name: str, rows: slice, columns: slice
    ) -> Float32[np.ndarray, "rows columns"]:
        """Read and decode a part of a quantized tensor."""
        (height, width), scale = self.block_shape, f"{name}_scale"
        shape = files.specs[scale].shape[0] * height, files.specs[scale].shape[1] * width
        if self.packed:
            start, stop, step = columns.indices(shape[1])
            first = start * self.bits // _WORD
            packed = files.read(f"{name}_packed", rows, slice(first, -(-stop * self.bits // _WORD)))
            before = first * _WORD // self.bits  # columns in the skipped words
            codes = _unpack(packed.view(np.uint8), self.bits)[:, start - before : stop - before : step]
            codes = codes.astype(np.int32) - (1 << (self.bits - 1))
        else:
            codes = files.read(name, rows, columns)
        scales = files.read_repeated(scale, (height, width), shape, (rows, columns))
        return codes.astype(np.float32) * scales


def _unpack(packed: UInt8[np.ndarray, "rows bytes"], bits: int) -> UInt8[np.ndarray, "rows codes"]:
    """Codes of 8, 4 or 2 bits from bytes, lowest first, one per byte."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (packed[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def _pack(codes: UInt8[np.ndarray, "rows codes"], bits: int) -> Shaped[np.ndarray, "rows words"]:
    """Codes as little-endian int32 words, lowest first, padded with zeros."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (_WORD // bits))))
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    packed = np.bitwise_or.reduce(codes.reshape(len(codes), -1, 8 // bits) << shifts, axis=-1)
    return np.ascontiguousarray(packed, np.uint8).view("<i4")
