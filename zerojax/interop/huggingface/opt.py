"""The OPT family: GPT-2's shape with ReLU, PyTorch's (out, in) weights and two unused position rows."""

from zerojax.interop.huggingface.config_table import (
    PLAIN_HEADS,
    choice,
    dropouts,
    fixed,
    key,
    only,
    unused,
)
from zerojax.interop.huggingface.mapping import Names

_TRUE = "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"

OPT = (
    # The epsilon is torch.nn.LayerNorm's; there is no key.
    fixed(positions="learned", norm="layer", biases=True, position_offset=2, norm_eps=1e-5),
    key("vocab_size", "vocab_size"),
    key("num_hidden_layers", "layers"),
    key("hidden_size", "d_model", twin="word_embed_proj_dim"),
    key("num_attention_heads", "heads"),
    PLAIN_HEADS,
    key("ffn_dim", "ffn", written="ffn_width"),
    choice("activation_function", "mlp", {"relu": "relu", "gelu": "gelu_exact", "gelu_new": "gelu"}),
    key("tie_word_embeddings", "tied", bool, True),
    key("max_position_embeddings", "max_seq_len"),
    *(only(name, True) for name in _TRUE),
    only("_remove_final_layer_norm", False),
    dropouts("attention_dropout", "activation_dropout", "layerdrop", dropout=("dropout",)),
    unused("init_std"),
)
OPT_NAMES = Names(
    {
        "norm_attention": "self_attn_layer_norm",
        "attention/qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention/out": "self_attn.out_proj",
        "norm_mlp": "final_layer_norm",
        "mlp/up": "fc1",
        "mlp/down": "fc2",
    },
    layers="decoder.layers.{layer}.",
    embed="decoder.embed_tokens",
    norm="decoder.final_layer_norm",
    position="decoder.embed_positions",
)
