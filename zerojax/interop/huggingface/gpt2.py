"""The GPT-2 family: learned positions, layer norms, biases, and ``Conv1D`` weights held as (in, out)."""

from typing import Any

from zerojax.interop.huggingface.config_keys import ConfigKeys, refuse_others
from zerojax.interop.huggingface.mapping import TensorParts, embeddings, whole
from zerojax.models import GPTConfig

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")

_ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
    "gelu": "gelu_exact",
    "relu": "relu",
}
_NAMES = {"gelu": "gelu_new", "gelu_exact": "gelu", "relu": "relu"}


def read(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    keys.only("activation_function", "gelu_new", *_ACTIVATIONS)
    keys.only("scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        keys.only(name, False)
    keys.only_training(*DROPOUTS)
    keys.unused(
        "n_ctx",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    )
    return GPTConfig(
        vocab_size=keys.take("vocab_size", int),
        layers=keys.take("n_layer", int),
        d_model=keys.take("n_embd", int),
        heads=keys.take("n_head", int),
        ffn=keys.take("n_inner", int, None),
        mlp=_ACTIVATIONS[keys.take("activation_function", str, "gelu_new")],  # type: ignore[arg-type]  # of the table above
        tied=keys.take("tie_word_embeddings", bool, True),
        max_seq_len=keys.take("n_positions", int),
        norm_eps=keys.take("layer_norm_epsilon", float, 1e-5),
    )


def write(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    refuse_others(
        model,
        "GPT-2",
        positions="learned",
        norm="layer",
        biases=True,
        key_value_heads=model.heads,
        head_dim=model.d_model // model.heads,
        mlp=tuple(_NAMES),
    )
    return {
        "activation_function": _NAMES[model.mlp],
        **dict.fromkeys(DROPOUTS, model.dropout),
        "layer_norm_epsilon": model.norm_eps,
        "n_ctx": model.max_seq_len,
        "n_embd": model.d_model,
        "n_head": model.heads,
        "n_inner": model.ffn_width,
        "n_layer": model.layers,
        "n_positions": model.max_seq_len,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab_size,
    }


def parts(model: GPTConfig, prefix: str) -> TensorParts:
    """The tensors of each leaf; all names except the output projection's begin with ``prefix``."""
    block = prefix + "h.{layer}."
    modules = {
        "norm_attention": "ln_1",
        "attention/qkv": "attn.c_attn",
        "attention/out": "attn.c_proj",
        "norm_mlp": "ln_2",
        "mlp/up": "mlp.c_fc",
        "mlp/down": "mlp.c_proj",
    }
    found = embeddings(prefix + "wte.weight", tied=model.tied) | {
        "position/embedding": whole(prefix + "wpe.weight"),
        "norm/scale": whole(prefix + "ln_f.weight"),
        "norm/bias": whole(prefix + "ln_f.bias"),
    }
    for ours, theirs in modules.items():
        weight = "scale" if ours.startswith("norm") else "kernel"
        found[f"block/{ours}/{weight}"] = whole(f"{block}{theirs}.weight")
        found[f"block/{ours}/bias"] = whole(f"{block}{theirs}.bias")
    return found
