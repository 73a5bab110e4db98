"""The GPT-2 family: learned positions, layer norms, biases, and ``Conv1D`` weights held as (in, out)."""

from zerojax.interop.huggingface.config_table import (
    Choice,
    Dropouts,
    Fixed,
    Key,
    Only,
    PlainHeads,
    SameAs,
    Unused,
)
from zerojax.interop.huggingface.mapping import Names

_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
_FALSE = "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"
_SUMMARY = "type", "use_proj", "activation", "proj_to_labels", "first_dropout"

GPT2 = (
    Fixed(positions="learned", norm="layer", biases=True),
    Key("vocab_size", "vocab_size"),
    Key("n_layer", "layers"),
    Key("n_embd", "d_model"),
    Key("n_head", "heads"),
    PlainHeads(),
    Key("n_inner", "ffn", int, None, written="ffn_width"),
    Choice("activation_function", "mlp", _ACTIVATIONS),
    Key("tie_word_embeddings", "tied", bool, True),
    Key("n_positions", "max_seq_len"),
    SameAs("n_ctx", "max_seq_len", checked=False),
    Key("layer_norm_epsilon", "norm_eps", float, 1e-5),
    Only("scale_attn_weights", True),
    *(Only(name, False) for name in _FALSE),
    Dropouts(dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    Unused(*(f"summary_{name}" for name in _SUMMARY)),
)
GPT2_NAMES = Names(
    {
        "norm_attention": "ln_1",
        "attention/qkv": "attn.c_attn",
        "attention/out": "attn.c_proj",
        "norm_mlp": "ln_2",
        "mlp/up": "mlp.c_fc",
        "mlp/down": "mlp.c_proj",
    },
    layers="h.{layer}.",
    embed="wte",
    norm="ln_f",
    position="wpe",
    transposed=False,
)
