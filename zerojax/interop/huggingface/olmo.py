"""OLMo 2 and 3: LLaMA with norms after the branches alone, and norms of all queries and keys together.

OLMo 3 has a window in three of four layers, whose rotary positions are never scaled.
"""

from typing import Any

from zerojax.interop.huggingface.config_table import only
from zerojax.interop.huggingface.layer_types import periodic, windows
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, QK_NORMS, SILU, like_llama
from zerojax.interop.huggingface.mapping import Module, Names
from zerojax.interop.huggingface.rope_keys import rope

_FIXED: dict[str, Any] = {"pre_norms": False, "post_norms": True, "qk_norm": True, "qk_norm_joint": True}
_PLAIN = only("attention_bias", False)

OLMO2 = like_llama(SILU, _PLAIN, kv_heads=None, norm_eps=1e-5, **_FIXED)
OLMO3 = like_llama(
    SILU,
    _PLAIN,
    windows(lambda _, found: periodic(found["layers"], 4)),
    kv_heads=None,
    norm_eps=1e-5,
    rotary=rope(theta=500000.0, tables="two"),
    **_FIXED,
)
_NORMS: dict[str, Module] = {
    "post_norm_attention": "post_attention_layernorm",
    "post_norm_mlp": "post_feedforward_layernorm",
}
_MODULES = {ours: theirs for ours, theirs in LLAMA_BLOCK.items() if not ours.startswith("norm")}
OLMO_NAMES = Names(_MODULES | QK_NORMS | _NORMS)
