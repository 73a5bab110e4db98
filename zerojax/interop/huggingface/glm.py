"""GLM 4: LLaMA with half of each head rotated, neighbours as pairs, and gate and up in one tensor.

The 0414 models (``glm4``) have norms after the branches as well; the earlier ones (``glm``) do not.
"""

from zerojax.interop.huggingface.config_table import Entry, key
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, SILU, like_llama
from zerojax.interop.huggingface.mapping import Names
from zerojax.interop.huggingface.phi3 import FUSED_MLP
from zerojax.interop.huggingface.rope_keys import rope


def _glm(*, post_norms: bool) -> tuple[Entry, ...]:
    return like_llama(
        SILU,
        key("attention_bias", "qkv_biases", bool, True),
        head_dim=128,
        norm_eps=1.5625e-7,
        rotary=rope(fraction=0.5),
        rope_interleaved=True,
        post_norms=post_norms,
    )


GLM, GLM4 = _glm(post_norms=False), _glm(post_norms=True)
GLM_NAMES = Names(LLAMA_BLOCK | FUSED_MLP)
GLM4_NAMES = Names(
    GLM_NAMES.block
    | {"post_norm_attention": "post_self_attn_layernorm", "post_norm_mlp": "post_mlp_layernorm"}
)
