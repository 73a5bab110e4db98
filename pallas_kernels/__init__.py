"""Blockwise quantization for communication: encode, decode, and the fused steps between two hops.

``encode_nf4`` and ``decode_nf4`` store frozen weights. ``attend_cache`` is the attention of generation.
``cast_transpose`` makes operands of fp8 matmuls. The functions ``grouped...`` are the matmuls of a mixture of
experts, and ``gather_rows`` makes their rows. ``delta_rule`` is the recurrence of linear attention.

The package only depends on jax, and is independent of zerojax. On CUDA it uses jax-triton if installed. The
modules ``reference``, ``nf4_reference``, ``attention_reference`` and ``grouped_reference`` are the
specifications.
"""

from pallas_kernels.attention import attend_cache
from pallas_kernels.backends import backend_report, for_platform
from pallas_kernels.codec import (
    decode,
    decode_add,
    decode_nf4,
    decode_sum,
    decode_sum_encode,
    encode,
    encode_delta,
    encode_nf4,
    encode_reordered,
)
from pallas_kernels.delta_chunks import delta_rule
from pallas_kernels.formats import BITS, FORMATS, QMAX, QUANTIZED, RAW, STORED, Format, nbytes, nf4_bytes
from pallas_kernels.grouped import (
    cast_transpose,
    gather_rows,
    grouped_columns,
    grouped_rows,
    grouped_rows_fp8,
    grouped_sums,
    grouped_sums_fp8,
)
from pallas_kernels.lowered import keep_lowered

__all__ = [
    "BITS",
    "FORMATS",
    "QMAX",
    "QUANTIZED",
    "RAW",
    "STORED",
    "Format",
    "attend_cache",
    "backend_report",
    "cast_transpose",
    "decode",
    "decode_add",
    "decode_nf4",
    "decode_sum",
    "decode_sum_encode",
    "delta_rule",
    "encode",
    "encode_delta",
    "encode_nf4",
    "encode_reordered",
    "for_platform",
    "gather_rows",
    "grouped_columns",
    "grouped_rows",
    "grouped_rows_fp8",
    "grouped_sums",
    "grouped_sums_fp8",
    "keep_lowered",
    "nbytes",
    "nf4_bytes",
]
