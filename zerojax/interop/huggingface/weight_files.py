"""The tensors of a model's folder; quantized tensors are decoded as they are read."""

from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks
from zerojax.interop.huggingface.mxfp4 import MXFP4
from zerojax.interop.huggingface.quantized import WeightFormat
from zerojax.interop.huggingface.safetensors_files import SafetensorFiles
from zerojax.validation.untrusted import short

QUANTIZATION = "quantization_config"
"""The key of quantized files in config.json. Exports remove it: their tensors are not in its format."""
QuantizedFormat = MXFP4 | FP8Blocks | WeightFormat
"""The formats of quantized tensors; exports write ``WeightFormat``."""


def read_format(keys: ConfigKeys) -> QuantizedFormat | None:
    """The format of a model's quantized tensors, if it has any. The files show which tensors these are."""
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
