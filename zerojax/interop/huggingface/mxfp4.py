"""MXFP4 (OCP Microscaling Formats 1.0), in which gpt-oss' experts were published, read as if it were bf16.

Of a tensor NAME of (experts, in, out) the files have NAME_blocks, (experts, out, in / 32, 16) bytes of two
e2m1 codes, the lower one first, and NAME_scales, (experts, out, in / 32) exponents of two with a bias of 127.
"""

from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import Entry, Fields
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles, TensorSpec
from zerojax.validation.untrusted import short

_BLOCK = 32
_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
KEY, _METHOD = "quantization_config", "mxfp4"
_CODES, _SCALES = "_blocks", "_scales"


def _check_method(keys: ConfigKeys, found: Fields) -> None:
    del found
    values = keys.take(KEY, dict, {})
    if values.get("quant_method", _METHOD) != _METHOD:
        raise ConfigurationError(
            f"{KEY} of quant_method = {short(values['quant_method'])} is not supported, only {_METHOD!r}"
        )


QUANTIZATION = Entry(_check_method)
"""The key of files with such tensors, which are exported without it."""


class WeightFiles:
    """The tensors of a model's folder, some of which may be in MXFP4 and are read as fp32.

    Raises:
        ConfigurationError: as ``SafetensorFiles``, or codes and scales do not fit.
    """

    def __init__(self, folder: Path) -> None:
        self._files = files = SafetensorFiles(folder)
        self._coded: set[str] = set()
        self.specs = dict(files.specs)
        for name, spec in files.specs.items():
            base = name.removesuffix(_CODES)
            scales = files.specs.get(base + _SCALES)
            if base == name or scales is None:
                continue
            experts, outputs, blocks, half = spec.shape if len(spec.shape) == 4 else (0, 0, 0, 0)
            bytes_of_both = TensorSpec("U8", spec.shape), TensorSpec("U8", (experts, outputs, blocks))
            if (spec, scales) != bytes_of_both or half != _BLOCK // 2:
                raise ConfigurationError(f"{name} {spec} and its scales {scales} are not MXFP4")
            del self.specs[name], self.specs[base + _SCALES]
            self.specs[base] = TensorSpec("BF16", (experts, blocks * _BLOCK, outputs))
            self._coded.add(base)

    def read(self, name: str, *ranges: slice) -> Shaped[np.ndarray, "..."]:
        """A part of a tensor, as ``SafetensorFiles.read``."""
        if name not in self._coded:
            return self._files.read(name, *ranges)
        experts, inputs, outputs = ranges or (slice(None),) * 3
        start, stop, _ = inputs.indices(self.specs[name].shape[1])
        first = start // _BLOCK
        blocks = slice(first, -(-stop // _BLOCK))
        codes = self._files.read(name + _CODES, experts, outputs, blocks)
        scales = self._files.read(name + _SCALES, experts, outputs, blocks).astype(np.int32) - 127
        values = np.stack([_VALUES[codes & 15], _VALUES[codes >> 4]], axis=-1)
        values = np.ldexp(values.reshape(*scales.shape, _BLOCK), scales[..., None])
        whole = values.reshape(*values.shape[:2], -1).swapaxes(1, 2)
        return whole[:, start - first * _BLOCK : stop - first * _BLOCK]
