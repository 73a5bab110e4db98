"""GPT-2 and OPT: learned positions, layer norms and biases.

GPT-2 has ``Conv1D`` weights of (in, out). OPT has ReLU, PyTorch's (out, in) weights and two unused rows of
positions.
"""

from zerojax.interop.huggingface.config_table import PLAIN_HEADS, choice, dropouts, fixed, key, only, unused
from zerojax.interop.huggingface.llama import QKV
from zerojax.interop.huggingface.mapping import Names

ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
_FALSE = "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"
_SUMMARY = "type", "use_proj", "activation", "proj_to_labels", "first_dropout"

GPT2 = (
    fixed(positions="learned", norm="layer", biases=True),
    key("vocab_size", "vocab_size"),
    key("n_layer", "layers"),
    key("n_embd", "d_model"),
    key("n_head", "heads"),
    PLAIN_HEADS,
    key("n_inner", "ffn", int, None, written="ffn_width"),
    choice("activation_function", "mlp", ACTIVATIONS),
    key("tie_word_embeddings", "tied", bool, True),
    key("n_positions", "max_seq_len"),
    unused("n_ctx", written="max_seq_len"),
    key("layer_norm_epsilon", "norm_eps", float, 1e-5),
    only("scale_attn_weights", True),
    *(only(name, False) for name in _FALSE),
    dropouts(dropout=("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    unused(*(f"summary_{name}" for name in _SUMMARY)),
    unused("n_special", "predict_special_tokens"),  # not read by transformers
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

_TRUE = "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"

OPT = (
    # The epsilon is torch.nn.LayerNorm's; there is no key.
    fixed(positions="learned", norm="layer", biases=True, position_offset=2, norm_eps=1e-5),
    key("vocab_size", "vocab_size"),
    key("num_hidden_layers", "layers"),
    key("hidden_size", "d_model", same="word_embed_proj_dim"),
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
        "attention/qkv": QKV,
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
