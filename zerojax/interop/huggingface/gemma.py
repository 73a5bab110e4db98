"""The Gemma families: LLaMA with scaled embeddings, norms around 1 and GEGLU.

Gemma 2 adds norms after each branch, soft caps and a window in every other layer; Gemma 3 norms of queries
and keys, and rotary wavelengths of their own for the layers with the window.
"""

from collections.abc import Mapping
from typing import Any

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import ConfigKeys
from zerojax.interop.huggingface.config_table import ANY, Entry, Follows, Key, Only, Unused
from zerojax.interop.huggingface.layer_types import Windows, periodic
from zerojax.interop.huggingface.llama import LLAMA_BLOCK, QK_NORMS, like_llama
from zerojax.interop.huggingface.mapping import Names
from zerojax.interop.huggingface.rope_keys import Rope
from zerojax.models import GPTConfig

_ACTIVATION = "gelu_pytorch_tanh"
_ONE_WAY = Only("use_bidirectional_attention", False, written=False)


class _QueryScalar(Entry):
    """``query_pre_attn_scalar``, a whole number."""

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        found["query_scalar"] = keys.take("query_pre_attn_scalar", float, 256.0)

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        scalar = model.head_dim if model.query_scalar is None else model.query_scalar
        if scalar != int(scalar):
            raise ConfigurationError(f"model.query_scalar = {scalar}, but Gemma has whole numbers")
        return {"query_pre_attn_scalar": int(scalar)}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        del model
        return {"query_scalar": ANY}


def _gemma(*entries: Entry, rope: Rope | None = None, **fixed: Any) -> tuple[Entry, ...]:
    return like_llama(
        Follows("embedding_scale", lambda model: model["d_model"] ** 0.5),
        Only("hidden_activation", _ACTIVATION),
        Only("attention_bias", False),
        *entries,
        head_dim=256,
        tied=True,
        rope=rope,
        mlp="geglu",
        norm_offset=1.0,
        **fixed,
    )


def _since_gemma2(
    *entries: Entry, caps: tuple[float | None, float | None], rope: Rope | None = None, **fixed: Any
) -> tuple[Entry, ...]:
    """With the caps of files that have no keys of them."""
    return _gemma(
        Only("hidden_act", _ACTIVATION),
        Unused("cache_implementation"),
        _QueryScalar(),
        Key("attn_logit_softcapping", "attention_softcap", float, caps[0], null=True),
        Key("final_logit_softcapping", "logit_softcap", float, caps[1], null=True),
        *entries,
        rope=rope,
        post_norms=True,
        **fixed,
    )


# The first releases say "gelu", but mean the other.
GEMMA = _gemma(Only("hidden_act", _ACTIVATION, "gelu"), _ONE_WAY)
GEMMA2 = _since_gemma2(
    _ONE_WAY,
    Unused("sliding_window_size"),
    Windows(lambda _, found: periodic(found["layers"], 2)),
    caps=(50.0, 30.0),
)
GEMMA3 = _since_gemma2(
    Only("use_bidirectional_attention", False),
    Unused("_sliding_window_pattern"),  # transformers writes but does not read it
    Windows(lambda keys, found: periodic(found["layers"], keys.take("sliding_window_pattern", int, 6))),
    caps=(None, None),
    rope=Rope(theta=1e6, tables="local"),
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
