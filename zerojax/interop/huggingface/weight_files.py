"""The tensors of a model's folder; quantized tensors are decoded as they are read."""

from pathlib import Path

import numpy as np
from jaxtyping import Float32, Shaped

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks
from zerojax.interop.huggingface.quantized import WeightFormat
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles, Specs, TensorSpec
from zerojax.validation.untrusted import short

_BLOCK = 32
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_CODES, _SCALES = "_blocks", "_scales"


class MXFP4:
    """MXFP4 (OCP Microscaling Formats 1.0), the published form of gpt-oss' experts, read as bf16.

    For a tensor NAME of (experts, in, out) the files have NAME_blocks and NAME_scales. NAME_blocks is
    (experts, out, in / 32, 16) bytes of two e2m1 codes, the lower one first. NAME_scales is
    (experts, out, in / 32) exponents of two with a bias of 127.
    """

    def decoded(self, specs: Specs) -> Specs:
        """The specs of decoded tensors, in bf16, from the specs of the files.

        Refuse tensors that are not MXFP4.
        """
        found = dict(specs)
        for name, spec in specs.items():
            base = name.removesuffix(_CODES)
            scales = specs.get(base + _SCALES)
            if base == name or scales is None:
                continue
            experts, outputs, blocks, half = spec.shape if len(spec.shape) == 4 else (0, 0, 0, 0)
            bytes_of_both = TensorSpec("U8", spec.shape), TensorSpec("U8", (experts, outputs, blocks))
            if (spec, scales) != bytes_of_both or half != _BLOCK // 2:
                raise ConfigurationError(f"{name} {spec} and its scales {scales} are not MXFP4")
            del found[name], found[base + _SCALES]
            found[base] = TensorSpec("BF16", (experts, blocks * _BLOCK, outputs))
        return found

    def read(
        self, files: SafetensorFiles, name: str, *ranges: slice
    ) -> Float32[np.ndarray, "experts inputs outputs"]:
        """Read and decode a part of a quantized tensor; bf16 holds the values exactly."""
        experts, inputs, outputs = ranges
        start, stop, _ = inputs.indices(files.specs[name + _CODES].shape[2] * _BLOCK)
        first = start // _BLOCK
        blocks = slice(first, -(-stop // _BLOCK))
        codes = files.read(name + _CODES, experts, outputs, blocks)
        scales = files.read(name + _SCALES, experts, outputs, blocks).astype(np.int32) - 127
        values = np.stack([_VALUES[codes & 15], _VALUES[codes >> 4]], axis=-1)
        values = np.ldexp(values.reshape(*scales.shape, _BLOCK), scales[..., None])
        whole = values.reshape(*values.shape[:2], -1).swapaxes(1, 2)
        return whole[:, start - first * _BLOCK : stop - first * _BLOCK]


QUANTIZATION = "quantization_config"
"""The key of quantized files in config.json. Exports remove it: their tensors are not in its format."""
ExportFormat = FP8Blocks | WeightFormat
"""The formats of quantized tensors that exports write."""

QuantizedFormat = MXFP4 | ExportFormat
"""The formats of quantized tensors in files."""


def read_format(keys: ConfigKeys) -> QuantizedFormat | None:
    """The format of a model's quantized tensors, or None. Refuse unsupported formats.

    The files show which tensors are quantized.
    """
    values = keys.take(QUANTIZATION, dict, {})
    if not values:
        return None
    own = ConfigKeys(values, QUANTIZATION)
    method = values.get("quant_method")
    if method == "mxfp4":
        return MXFP4()
    if method == "fp8":
        own.only("fmt", "e4m3")
        # Defaults as in transformers. Null means one scale for a whole tensor.
        return FP8Blocks.of(own.nullable("weight_block_size", list, [128, 128]))
    raise ConfigurationError(
        f"{QUANTIZATION} with quant_method = {short(method)} is not supported, only 'fp8' and 'mxfp4'. "
        "Convert the files to bf16, and remove this key"
    )


class WeightFiles:
    """The tensors of a model's folder; ``how`` is the format of quantized tensors."""

    def __init__(self, folder: Path, how: QuantizedFormat | None) -> None:
        self._files = SafetensorFiles(folder)
        self._how = how
        self.specs = self._files.specs if how is None else how.decoded(self._files.specs)

    def read(self, name: str, *ranges: slice) -> Shaped[np.ndarray, "..."]:
        """Read a part of a tensor, decoded; ranges as in ``SafetensorFiles.read``."""
        spec = self.specs[name]
        if self._how is None or spec == self._files.specs.get(name):
            return self._files.read(name, *ranges)
        return self._how.read(self._files, name, *(ranges or (slice(None),) * len(spec.shape)))
