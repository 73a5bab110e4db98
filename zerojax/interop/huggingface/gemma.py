"""The Gemma families: LLaMA with scaled embeddings, norms around 1 and GEGLU.

Gemma 2 adds norms after each branch, softcaps, and a window in every other layer. Gemma 3 adds norms of
queries and keys, and other rotary wavelengths in layers with the window. It has no softcap in attention.
"""

from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_table import Entry, follows, ignored, key, only, unused
from zerojax.interop.huggingface.layer_types import periodic, windows
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, NO_BIASES, QK_NORMS, like_llama
from zerojax.interop.huggingface.mapping import Names
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models import GPTConfig

_ACTIVATION = "gelu_pytorch_tanh"
_ONE_WAY = only("use_bidirectional_attention", False, written=False)


def _query_scalar(model: GPTConfig) -> int:
    scalar = model.head_dim if model.query_scalar is None else model.query_scalar
    if scalar != int(scalar):
        raise ConfigurationError(f"model.query_scalar = {scalar}, but Gemma has whole numbers")
    return int(scalar)


def _gemma(*entries: Entry, **values: Any) -> tuple[Entry, ...]:
    return like_llama(
        follows("embedding_scale", lambda model: model["d_model"] ** 0.5),
        only("hidden_activation", _ACTIVATION),
        NO_BIASES,
        *entries,
        head_dim=256,
        tied=True,
        mlp="geglu",
        norm_offset=1.0,
        **values,
    )


def _since_gemma2(*entries: Entry, logit_cap: float | None, **values: Any) -> tuple[Entry, ...]:
    """Keys of Gemma 2 and 3; ``logit_cap`` is the logits' softcap for files without its key."""
    return _gemma(
        only("hidden_act", _ACTIVATION),
        unused("cache_implementation"),
        key("query_pre_attn_scalar", "query_scalar", float, 256.0, written=_query_scalar),
        key("final_logit_softcapping", "logit_softcap", float, logit_cap, null=True),
        *entries,
        post_norms=True,
        **values,
    )


# The first releases say "gelu", but were trained with the tanh form.
GEMMA = _gemma(only("hidden_act", _ACTIVATION, "gelu"), _ONE_WAY)
GEMMA2 = _since_gemma2(
    _ONE_WAY,
    key("attn_logit_softcapping", "attention_softcap", float, 50.0, null=True),
    unused("sliding_window_size"),
    windows(lambda _, found: periodic(found["layers"], 2)),
    logit_cap=30.0,
)
GEMMA3 = _since_gemma2(
    only("use_bidirectional_attention", False),
    ignored("attn_logit_softcapping"),
    unused("_sliding_window_pattern"),  # transformers writes but does not read it
    windows(lambda keys, found: periodic(found["layers"], keys.take("sliding_window_pattern", int, 6))),
    logit_cap=None,
    rotary=Rope(theta=1e6, tables="local"),
    qk_norm=True,
)
GEMMA2_NAMES = Names(
    LLAMA_BLOCK
    | {
        "post_norm_attention": "post_attention_layernorm",
        "norm_mlp": "pre_feedforward_layernorm",
        "post_norm_mlp": "post_feedforward_layernorm",
    }
)
GEMMA3_NAMES = Names(GEMMA2_NAMES.block | QK_NORMS)
