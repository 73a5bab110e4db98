"""The Qwen families: LLaMA with biases on query, key and value (2, 2.5), or norms of queries and keys (3)."""

from zerojax.interop.huggingface.config_table import only
from zerojax.interop.huggingface.layer_types import LAST_WINDOWS
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, QK_NORMS, SILU, like_llama
from zerojax.interop.huggingface.mapping import Names

QWEN2 = like_llama(SILU, *LAST_WINDOWS, only("use_mrope", False), qkv_biases=True)
QWEN3 = like_llama(SILU, *LAST_WINDOWS, only("attention_bias", False), head_dim=128, qk_norm=True)
QWEN3_NAMES = Names(LLAMA_BLOCK | QK_NORMS)
