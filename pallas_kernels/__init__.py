"""Blockwise quantization for communication: encode, decode, and the fused steps between two hops.

The package depends on jax alone (on CUDA it uses jax-triton if installed) and is independent of zerojax.
``pallas_kernels.reference`` is the specification.
"""

from pallas_kernels.backends import backend_report
from pallas_kernels.dispatch import (
    decode,
    decode_add,
    decode_sum,
    decode_sum_encode,
    encode,
    encode_delta,
    encode_reordered,
)
from pallas_kernels.formats import BITS, FORMATS, QMAX, QUANTIZED, RAW, Format, nbytes

__all__ = [
    "BITS",
    "FORMATS",
    "QMAX",
    "QUANTIZED",
    "RAW",
    "Format",
    "backend_report",
    "decode",
    "decode_add",
    "decode_sum",
    "decode_sum_encode",
    "encode",
    "encode_delta",
    "encode_reordered",
    "nbytes",
]
