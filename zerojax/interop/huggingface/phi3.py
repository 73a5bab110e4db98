"""The Phi-3 family: LLaMA with query, key and value in one tensor, and gate and up in another; longrope.

A model without longrope and with whole heads rotated that was not imported is exported as LLaMA or Mistral,
which compute the same.
"""

from zerojax.interop.huggingface.config_table import dropouts, key, only, unused
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, SILU, like_llama
from zerojax.interop.huggingface.mapping import Fused, Module, Names
from zerojax.interop.huggingface.rope_keys import rope

PHI3 = like_llama(
    SILU,
    *(only(name, False) for name in ("attention_bias", "mlp_bias", "lm_head_bias")),
    key("sliding_window", "sliding_window", int, None),
    dropouts(dropout=("resid_pdrop", "embd_pdrop")),
    unused("full_attn_mod", "interpolate_factor"),  # transformers reads none
    kv_heads=None,
    norm_eps=1e-5,
    rotary=rope(kinds=("longrope",), fraction=1.0),
)
FUSED_MLP: dict[str, Module] = {
    "mlp/gate": Fused("mlp.gate_up_proj", 0, 2),
    "mlp/up": Fused("mlp.gate_up_proj", 1, 2),
}
PHI3_NAMES = Names(LLAMA_BLOCK | FUSED_MLP | {"attention/qkv": "self_attn.qkv_proj"})
