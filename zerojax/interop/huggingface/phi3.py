"""The Phi-3 family: LLaMA with query, key and value in one tensor, and gate and up in another.

A model of this shape that was not imported is exported as LLaMA or Mistral, which compute the same.
"""

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import llama
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.mapping import TensorParts, matrix, rows_of
from zerojax.models import GPTConfig


def read(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.only("hidden_act", "silu", "swish")
    for name in ("attention_bias", "lm_head_bias"):
        keys.only(name, False)
    keys.only("partial_rotary_factor", 1.0)
    keys.only_training("resid_pdrop", "embd_pdrop")
    # Only longrope, which is refused, reads the first; transformers reads none of the others.
    keys.unused("original_max_position_embeddings", "full_attn_mod", "interpolate_factor")
    shape = llama.read_shape(keys, kv_heads=None, norm_eps=1e-5)
    if "rope_scaling" in shape:
        raise ConfigurationError(f"rope_type = {shape['rope_scaling']!r} is not supported, only 'default'")
    return GPTConfig(**shape, sliding_window=keys.nullable("sliding_window", int, None))


def parts(model: GPTConfig, prefix: str) -> TensorParts:
    """The tensors of each leaf; all names except the output projection's begin with ``prefix``."""
    block, width = prefix + "layers.{layer}.", model.ffn_width
    fused = f"{block}mlp.gate_up_proj.weight"
    return llama.parts(model, prefix) | {
        "block/attention/qkv/kernel": matrix(f"{block}self_attn.qkv_proj.weight"),
        "block/mlp/gate/kernel": rows_of(fused, 0, 2 * width),
        "block/mlp/up/kernel": rows_of(fused, width, 2 * width),
    }
