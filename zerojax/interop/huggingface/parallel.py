"""Families with layer norms, most with parallel branches: GPT-NeoX, Falcon, Cohere, Phi and StableLM.

- GPT-NeoX (Pythia): a norm for each branch, biases, and part of each head rotated. One tensor holds query,
  key and value of one head after the other.
- Falcon: biases in norms only. The 40B has two norms and several heads of keys and values; the 7B has one
  norm and one such head. Falcons with ALiBi instead of rotary positions are refused.
- Cohere (Command R, Aya): one norm without a bias, gated, tied, neighbours rotated as pairs, scaled logits.
  Cohere 2 rotates only in layers with a window.
- Phi 1 to 2: one norm, biases everywhere, including the output projection, and part of each head rotated.
- StableLM: biases in norms and perhaps in query, key and value; part of each head rotated. In most models
  the branches are sequential.
"""

from dataclasses import dataclass, replace
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import (
    ANY,
    PLAIN_HEADS,
    Entry,
    Fields,
    choice,
    dropouts,
    fixed,
    key,
    only,
    unused,
)
from zerojax.interop.huggingface.gpt2 import ACTIVATIONS
from zerojax.interop.huggingface.layer_types import full_unrotated, patterned, windows
from zerojax.interop.huggingface.llama import (
    ATTENTION_BIASES,
    LLAMA_BLOCK,
    QKV,
    SILU,
    like_llama,
    linear_biases,
)
from zerojax.interop.huggingface.mapping import Names, Source, TensorParts, qkv_groups
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models.config import GPTConfig
from zerojax.models.options import Branches

_GELUS = {"gelu": "gelu_exact"} | ACTIVATIONS
_SIZES = (
    key("vocab_size", "vocab_size"),
    key("num_hidden_layers", "layers"),
    key("hidden_size", "d_model"),
    key("num_attention_heads", "heads"),
)


def _branches(kind: Branches, *, default: bool) -> Entry:
    """The key that makes branches parallel, of this kind."""
    return key(
        *("use_parallel_residual", "branches", bool, default),
        decode=lambda parallel, _: kind if parallel else "sequential",
        written=lambda model: model.branches == kind,
    )


def _entry(rope: Rope) -> Entry:
    return Entry(rope.read, rope.write, rope.allowed)


GPT_NEOX = (
    fixed(positions="rope", norm="layer", biases=True),
    *_SIZES,
    PLAIN_HEADS,
    key("intermediate_size", "ffn", written="ffn_width"),
    choice("hidden_act", "mlp", _GELUS),
    key("tie_word_embeddings", "tied", bool, False),
    key("layer_norm_eps", "norm_eps", float, 1e-5),
    only("attention_bias", True),
    _branches("parallel", default=True),
    Entry(allowed=lambda _: {"branches": ("sequential", "parallel")}),
    _entry(Rope(fraction=0.25, names=("rotary_emb_base", "rotary_pct"))),
    dropouts("attention_dropout", "classifier_dropout", dropout=("hidden_dropout",)),
    unused("is_decoder", "attention_probs_dropout_prob", "hidden_dropout_prob"),
)
GPT_NEOX_NAMES = Names(
    {
        "norm_attention": "input_layernorm",
        "attention/qkv": Source("attention.query_key_value", qkv_groups),
        "attention/out": "attention.dense",
        "norm_mlp": "post_attention_layernorm",
        "mlp/up": "mlp.dense_h_to_4h",
        "mlp/down": "mlp.dense_4h_to_h",
    },
    embed="embed_in",
    norm="final_layer_norm",
    head="embed_out",
)


def _falcon(keys: ConfigKeys, found: Fields) -> Fields:
    """The heads and branches of Falcon's two architectures."""
    new, parallel = (keys.take(*each) for each in _FALCON_KINDS[:2])
    shared, norms = keys.take(*_FALCON_KINDS[2]), keys.take("num_ln_in_parallel_attn", int, 2 if new else 1)
    if norms not in (1, 2) or (new and not parallel) or (norms == 2 and not new):
        raise ConfigurationError(
            f"num_ln_in_parallel_attn = {norms} with new_decoder_architecture = {new} and parallel_attn = "
            f"{parallel} is not supported"
        )
    heads = keys.take("num_kv_heads", int, found["heads"])
    branches = "sequential" if not parallel else "parallel" if norms == 2 else "parallel_one_norm"
    return {"kv_heads": heads if new else 1 if shared else found["heads"], "branches": branches}


_FALCON_KINDS: tuple[tuple[str, type, Any], ...] = (
    ("new_decoder_architecture", bool, False),
    ("parallel_attn", bool, True),
    ("multi_query", bool, True),
)


def _write_falcon(model: GPTConfig) -> Fields:
    groups, new = model.key_value_heads, model.branches == "parallel"
    if not new and groups not in (1, model.heads):
        new = True  # the older architecture has either one head of keys and values, or all heads
        if model.branches == "sequential":
            raise ConfigurationError(
                f"model.kv_heads = {groups}, but a sequential Falcon has 1 or {model.heads}"
            )
    return {
        "new_decoder_architecture": new,
        "parallel_attn": model.branches != "sequential",
        "multi_query": new or groups == 1,
        "num_kv_heads": groups if new else model.heads,
        "num_ln_in_parallel_attn": 2 if model.branches == "parallel" else 1 if new else None,
    }


FALCON = (
    fixed(positions="rope", norm="layer", head_width=None),
    *_SIZES,
    Entry(_falcon, _write_falcon, lambda _: dict.fromkeys(("kv_heads", "branches"), ANY)),
    key("ffn_hidden_size", "ffn", int, None, written="ffn_width"),
    choice("activation", "mlp", _GELUS),
    key("tie_word_embeddings", "tied", bool, True),
    key("layer_norm_epsilon", "norm_eps", float, 1e-5),
    linear_biases("bias", default=False),
    only("alibi", False),
    only("apply_residual_connection_post_layernorm", False, written=False),
    _entry(Rope(length=2048)),
    dropouts("attention_dropout", dropout=("hidden_dropout",)),
)


@dataclass(frozen=True)
class FalconNames(Names):
    """Falcon's names; the names of norms depend on their number."""

    def parts(self, model: GPTConfig, prefix: str) -> TensorParts:
        """See ``Names.parts``."""
        norms = ("ln_attn", "ln_mlp") if model.branches == "parallel" else _FALCON_NORMS
        block = self.block | dict(zip(("norm_attention", "norm_mlp"), norms, strict=True))
        return Names.parts(replace(self, block=block), model, prefix)


_FALCON_NORMS = "input_layernorm", "post_attention_layernorm"
FALCON_NAMES = FalconNames(
    {
        "attention/qkv": Source("self_attention.query_key_value", qkv_groups),
        "attention/out": "self_attention.dense",
        "mlp/up": "mlp.dense_h_to_4h",
        "mlp/down": "mlp.dense_4h_to_h",
    },
    layers="h.{layer}.",
    embed="word_embeddings",
    norm="ln_f",
)

PHI = like_llama(
    choice("hidden_act", "mlp", ACTIVATIONS),
    only("qk_layernorm", False),
    dropouts(dropout=("resid_pdrop", "embd_pdrop")),
    kv_heads=None,
    norm="layer",
    norm_key="layer_norm_eps",
    norm_eps=1e-5,
    rotary=Rope(fraction=0.5),
    biases=True,
    head_bias=True,
    branches="parallel_one_norm",
)
PHI_NAMES = Names(
    {
        "norm_attention": "input_layernorm",
        "attention/qkv": QKV,
        "attention/out": "self_attn.dense",
        "mlp/up": "mlp.fc1",
        "mlp/down": "mlp.fc2",
    },
    norm="final_layernorm",
)
STABLELM = like_llama(
    SILU,
    key("use_qkv_bias", "qkv_biases", bool, False),
    only("qk_layernorm", False),
    _branches("parallel_one_norm", default=False),
    Entry(allowed=lambda _: {"branches": ("sequential", "parallel_one_norm")}),
    dropouts(dropout=("hidden_dropout",)),
    kv_heads=32,
    norm="layer",
    norm_key="layer_norm_eps",
    norm_eps=1e-5,
    rotary=Rope(fraction=0.25),
    norm_biases=True,
)


def _cohere(*entries: Entry, **values: Any) -> tuple[Entry, ...]:
    return like_llama(
        SILU,
        ATTENTION_BIASES,
        key(
            *("logit_scale", "logit_divisor", float, 0.0625),
            decode=_divisor,
            written=lambda model: float(f"{1 / model.logit_divisor:.15g}"),
        ),
        *entries,
        kv_heads=None,
        norm="layer",
        norm_key="layer_norm_eps",
        norm_eps=1e-5,
        tied=True,
        branches="parallel_one_norm",
        rope_interleaved=True,
        **values,
    )


def _divisor(scale: float, _: Fields) -> float:
    if not 1e-9 < scale < 1e9:
        raise ConfigurationError(f"logit_scale = {scale} is not supported, only from 1e-9 to 1e9")
    return 1 / scale


COHERE = _cohere(
    only("use_qk_norm", False),
    only("pretraining_tp", 1, written=False),
    unused("model_max_length"),
    rotary=Rope(theta=500000.0),
)
COHERE2 = _cohere(
    windows(patterned),
    full_unrotated(always=True),
    Entry(allowed=lambda _: {"head_width": None}),
    only("order_of_interleaved_layers", "local_attn_first", written=False),
    only("position_embedding_type", "rope_gptj", written=False),
    only("rotary_pct", 1.0, written=False),
    *(only(f"use_{name}", True, written=False) for name in ("gated_activation", "parallel_block")),
    unused("layer_switch", "use_embedding_sharing", "use_parallel_embedding", "cache_implementation"),
)
COHERE_NAMES = Names({ours: theirs for ours, theirs in LLAMA_BLOCK.items() if ours != "norm_mlp"})
