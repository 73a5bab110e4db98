"""The LLaMA family, 1 to 3: rotary positions, RMS norms, SwiGLU, grouped keys and values."""

from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys, refuse_others
from zerojax.interop.huggingface.mapping import TensorParts, embeddings, matrix, side_by_side, whole
from zerojax.models import GPTConfig

_LLAMA3 = {  # their name -> ours
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len",
}


def read(keys: ConfigKeys) -> GPTConfig:
    """The model of a config.json.

    Raises:
        ConfigurationError: a value is not supported.
    """
    keys.only("hidden_act", "silu", "swish")
    keys.only("pretraining_tp", 1)
    biases = keys.take("attention_bias", bool, False)
    if biases != keys.take("mlp_bias", bool, False):
        raise ConfigurationError("attention_bias and mlp_bias are supported together or not at all")
    keys.only_training("attention_dropout")
    width, heads = keys.take("hidden_size", int), keys.take("num_attention_heads", int)
    head_width = keys.take("head_dim", int, None)
    return GPTConfig(
        vocab_size=keys.take("vocab_size", int),
        layers=keys.take("num_hidden_layers", int),
        d_model=width,
        heads=heads,
        head_width=None if head_width is None or head_width * heads == width else head_width,
        kv_heads=keys.take("num_key_value_heads", int, None),
        ffn=keys.take("intermediate_size", int),
        norm="rms",
        positions="rope",
        mlp="swiglu",
        tied=keys.take("tie_word_embeddings", bool, False),
        biases=biases,
        max_seq_len=keys.take("max_position_embeddings", int),
        norm_eps=keys.take("rms_norm_eps", float, 1e-6),
        **_read_rope(keys),
    )


def _read_rope(keys: ConfigKeys) -> dict[str, Any]:
    """The rotary fields, from ``rope_theta`` and ``rope_scaling`` or transformers 5's ``rope_parameters``."""
    theta = keys.take("rope_theta", float, 10000.0)
    tables = [keys.take(name, dict, {}) for name in ("rope_scaling", "rope_parameters")]
    rope = ConfigKeys(tables[0] | tables[1], "rope_parameters")
    theta = rope.take("rope_theta", float, theta)
    rope.only("partial_rotary_factor", 1, 1.0)
    old = rope.take("type", str, "default")  # the name of rope_type before transformers 4.43
    kind = rope.take("rope_type", str, old)
    rope.only("type", kind)
    rope.only("rope_type", "default", "linear", "llama3")
    fields: dict[str, Any] = {"rope_theta": theta}
    if kind == "linear":
        fields |= {"rope_scaling": "linear", "rope_factor": rope.take("factor", float)}
    if kind == "llama3":
        length = {"rope_original_len": rope.take("original_max_position_embeddings", int)}
        factors = {ours: rope.take(name, float) for name, ours in _LLAMA3.items() if ours not in length}
        fields |= {"rope_scaling": "llama3", **factors, **length}
    rope.finish()
    return fields


def write(model: GPTConfig) -> dict[str, Any]:
    """The config.json of a model, as transformers 4 and 5 both read it.

    Raises:
        ConfigurationError: LLaMA does not have such models; names the field.
    """
    refuse_others(model, "LLaMA", positions="rope", norm="rms", mlp="swiglu")
    scaling: dict[str, Any] | None = None
    if model.rope_scaling == "linear":
        scaling = {"rope_type": "linear", "factor": model.rope_factor}
    if model.rope_scaling == "llama3":
        scaling = {"rope_type": "llama3"} | {name: getattr(model, ours) for name, ours in _LLAMA3.items()}
    return {
        "attention_bias": model.biases,
        "attention_dropout": 0.0,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.d_model,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.max_seq_len,
        "mlp_bias": model.biases,
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.key_value_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_scaling": scaling,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab_size,
    }


def parts(model: GPTConfig, prefix: str) -> TensorParts:
    """The tensors of each leaf; all names except the output projection's begin with ``prefix``."""
    block = prefix + "layers.{layer}."
    found = embeddings(prefix + "embed_tokens.weight", tied=model.tied) | {
        "norm/scale": whole(prefix + "norm.weight"),
        "block/norm_attention/scale": whole(block + "input_layernorm.weight"),
        "block/norm_mlp/scale": whole(block + "post_attention_layernorm.weight"),
    }
    widths = (model.attention_width, *(model.key_value_heads * model.head_dim,) * 2)
    linear = {"attention/out": "self_attn.o_proj"} | {
        f"mlp/{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")
    }
    for kind, leaf in (("weight", "kernel"), ("bias", "bias"))[: 2 if model.biases else 1]:
        names = tuple(f"{block}self_attn.{which}_proj.{kind}" for which in "qkv")
        found[f"block/attention/qkv/{leaf}"] = side_by_side(names, widths, transposed=leaf == "kernel")
        for ours, theirs in linear.items():
            make = matrix if leaf == "kernel" else whole
            found[f"block/{ours}/{leaf}"] = make(f"{block}{theirs}.{kind}")
    return found
