"""The OPT family: GPT-2's shape with ReLU, PyTorch's (out, in) weights and two unused position rows."""

from typing import Any

from zerojax.interop.huggingface.config_keys import ConfigKeys, refuse_others
from zerojax.interop.huggingface.mapping import TensorParts, embeddings, matrix, side_by_side, whole
from zerojax.models import GPTConfig

DROPOUTS = ("dropout", "attention_dropout", "activation_dropout", "layerdrop")
POSITION_OFFSET = 2

_ACTIVATIONS = {"relu": "relu", "gelu": "gelu_exact", "gelu_new": "gelu"}
_NAMES = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}


def read(keys: ConfigKeys) -> GPTConfig:
    """See ``Family.read``."""
    width = keys.take("hidden_size", int)
    keys.only("word_embed_proj_dim", width)
    keys.only("activation_function", "relu", *_ACTIVATIONS)
    for name in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        keys.only(name, True)
    keys.only("_remove_final_layer_norm", False)
    keys.only_training(*DROPOUTS)
    keys.unused("init_std")
    return GPTConfig(
        vocab_size=keys.take("vocab_size", int),
        layers=keys.take("num_hidden_layers", int),
        d_model=width,
        heads=keys.take("num_attention_heads", int),
        ffn=keys.take("ffn_dim", int),
        position_offset=POSITION_OFFSET,
        mlp=_ACTIVATIONS[keys.take("activation_function", str, "relu")],  # type: ignore[arg-type]  # of the table above
        tied=keys.take("tie_word_embeddings", bool, True),
        max_seq_len=keys.take("max_position_embeddings", int),
    )


def write(model: GPTConfig) -> dict[str, Any]:
    """See ``Family.write``."""
    refuse_others(
        model,
        "OPT",
        positions="learned",
        position_offset=POSITION_OFFSET,
        norm="layer",
        norm_eps=1e-5,
        biases=True,
        key_value_heads=model.heads,
        head_dim=model.d_model // model.heads,
        mlp=tuple(_NAMES),
    )
    return {
        "_remove_final_layer_norm": False,
        "activation_function": _NAMES[model.mlp],
        "attention_dropout": 0.0,
        "do_layer_norm_before": True,
        "dropout": model.dropout,
        "enable_bias": True,
        "ffn_dim": model.ffn_width,
        "hidden_size": model.d_model,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
        "max_position_embeddings": model.max_seq_len,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab_size,
        "word_embed_proj_dim": model.d_model,
    }


def parts(model: GPTConfig, prefix: str) -> TensorParts:
    """The tensors of each leaf; all names except the output projection's begin with ``prefix``."""
    decoder, block = prefix + "decoder.", prefix + "decoder.layers.{layer}."
    found = embeddings(decoder + "embed_tokens.weight", tied=model.tied) | {
        "position/embedding": whole(decoder + "embed_positions.weight"),
        "norm/scale": whole(decoder + "final_layer_norm.weight"),
        "norm/bias": whole(decoder + "final_layer_norm.bias"),
    }
    widths = (model.d_model,) * 3
    for kind, leaf in (("weight", "kernel"), ("bias", "bias")):
        names = tuple(f"{block}self_attn.{which}_proj.{kind}" for which in "qkv")
        found[f"block/attention/qkv/{leaf}"] = side_by_side(names, widths, transposed=leaf == "kernel")
    for ours, theirs in (("norm_attention", "self_attn_layer_norm"), ("norm_mlp", "final_layer_norm")):
        found[f"block/{ours}/scale"] = whole(f"{block}{theirs}.weight")
        found[f"block/{ours}/bias"] = whole(f"{block}{theirs}.bias")
    for ours, theirs in (("attention/out", "self_attn.out_proj"), ("mlp/up", "fc1"), ("mlp/down", "fc2")):
        found[f"block/{ours}/kernel"] = matrix(f"{block}{theirs}.weight")
        found[f"block/{ours}/bias"] = whole(f"{block}{theirs}.bias")
    return found
