"""Blockwise quantization for communication: encode, decode, and the fused steps between two hops.

``encode_nf4`` and ``decode_nf4`` store frozen weights. ``attend_cache`` is the attention of generation.
``cast_transpose`` makes operands of fp8 matmuls. The functions ``grouped...`` are the matmuls of a mixture of
experts, and ``gather_rows`` makes their rows. ``delta_rule`` is the recurrence of linear attention.

The package only depends on jax, and is independent of zerojax. On CUDA it uses jax-triton if installed. The
modules ``reference``, ``nf4_reference``, ``attention_reference`` and ``grouped_reference`` are the
specifications.
"""

from pallas_kernels.attention import attend_cache as attend_cache
from pallas_kernels.backends import backend_report as backend_report
from pallas_kernels.backends import for_platform as for_platform
from pallas_kernels.codec import decode as decode
from pallas_kernels.codec import decode_add as decode_add
from pallas_kernels.codec import decode_nf4 as decode_nf4
from pallas_kernels.codec import decode_sum as decode_sum
from pallas_kernels.codec import decode_sum_encode as decode_sum_encode
from pallas_kernels.codec import encode as encode
from pallas_kernels.codec import encode_delta as encode_delta
from pallas_kernels.codec import encode_nf4 as encode_nf4
from pallas_kernels.codec import encode_reordered as encode_reordered
from pallas_kernels.delta_chunks import delta_rule as delta_rule
from pallas_kernels.formats import BITS as BITS
from pallas_kernels.formats import FORMATS as FORMATS
from pallas_kernels.formats import QMAX as QMAX
from pallas_kernels.formats import QUANTIZED as QUANTIZED
from pallas_kernels.formats import RAW as RAW
from pallas_kernels.formats import STORED as STORED
from pallas_kernels.formats import Format as Format
from pallas_kernels.formats import nbytes as nbytes
from pallas_kernels.formats import nf4_bytes as nf4_bytes
from pallas_kernels.grouped import cast_transpose as cast_transpose
from pallas_kernels.grouped import gather_rows as gather_rows
from pallas_kernels.grouped import grouped_columns as grouped_columns
from pallas_kernels.grouped import grouped_rows as grouped_rows
from pallas_kernels.grouped import grouped_rows_fp8 as grouped_rows_fp8
from pallas_kernels.grouped import grouped_sums as grouped_sums
from pallas_kernels.grouped import grouped_sums_fp8 as grouped_sums_fp8
from pallas_kernels.lowered import keep_lowered as keep_lowered
