"""Rotary positions in config.json: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters`` alone.

The latter is transformers 5's; zerojax reads both and writes the former, which version 5 reads as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.interop.huggingface.config_table import ANY, Entry
from zerojax.interop.huggingface.layer_types import FULL, SLIDING
from zerojax.models import GPTConfig
from zerojax.models.rope import yarn_amplitude
from zerojax.validation.untrusted import short

_LLAMA3 = {  # their name -> ours
    "factor": "rope_factor",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "original_max_position_embeddings": "rope_original_len",
}
_LENGTH, _PARTIAL, _GROWTH = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "llama_4_scaling_beta",
)
_COMMON = ("linear", "llama3", "dynamic", "yarn")
# Fields that mean something in some kinds of scaling alone, and those that are features of a family.
_OF_SCALING = tuple(field.name for field in fields(GPTConfig) if field.name.startswith("rope_"))
_FEATURES = ("rope_fraction", "rope_interleaved", "rope_local_theta", "rope_query_growth")


@dataclass(frozen=True)
class Rope(Entry):
    """The rotary fields of a model, and its max_seq_len.

    Attributes:
        theta: without rope_theta.
        kinds: of scaling, beside none.
        fraction: without partial_rotary_factor; None if the family has no such key.
        tables: "one" for all layers; "two", of layers with and without a window, or "local" if the first has
            a key of its own; "growth": one, with Ministral 3's growth of queries.
        local: "local": without rope_local_base_freq.
    """

    theta: float = 10000.0
    kinds: tuple[str, ...] = _COMMON
    fraction: float | None = None
    tables: Literal["one", "two", "local", "growth"] = "one"
    local: float = 10000.0

    def read(self, keys: ConfigKeys, found: dict[str, Any]) -> None:
        """See ``Entry``."""
        theta, length = keys.take("rope_theta", float, self.theta), keys.take("max_position_embeddings", int)
        needed = REQUIRED if self.tables == "growth" else {}
        table, scaling = keys.take("rope_parameters", dict, needed), keys.take("rope_scaling", dict, {})
        beside: dict[str, Any] = {}  # keys outside the tables
        if self.fraction is not None:
            beside[_PARTIAL] = keys.take(_PARTIAL, float, self.fraction)
        if "longrope" in self.kinds:
            beside[_LENGTH] = keys.take(_LENGTH, int, 4096)
        if self.tables in ("one", "growth"):
            found |= self._table(scaling | table, theta, length, beside)
            return
        if unknown := sorted(table.keys() - {FULL, SLIDING}):
            raise ConfigurationError(f"rope_parameters of {', '.join(unknown)} are not supported")
        local = keys.take("rope_local_base_freq", float, self.local) if self.tables == "local" else theta
        windowed = self._table(table.get(SLIDING) or {}, local, length, beside)
        if "rope_scaling" in windowed:
            raise ConfigurationError(
                f"rope_type = {windowed['rope_scaling']!r} of {SLIDING} is not supported"
            )
        full = self._table((table.get(FULL) or {}) | scaling, theta, length, beside)
        alike = "rope_scaling" not in full and full["rope_theta"] == windowed["rope_theta"]
        found |= full | {"rope_local_theta": None if alike else windowed["rope_theta"]}

    def _table(
        self, values: dict[str, Any], theta: float, length: int, beside: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The fields that one table of rotary parameters describes.

        Args:
            values: the table.
            theta: where the table has none.
            length: max_position_embeddings.
            beside: keys outside the table.

        Raises:
            ConfigurationError: a value is not supported.
        """
        if values.get("rope_type") is None:  # its name was "type" before transformers 4.43
            values = values | {"rope_type": values.get("type")}
        rope = ConfigKeys(values, "rope_parameters")
        fields: dict[str, Any] = {"rope_theta": rope.take("rope_theta", float, theta), "max_seq_len": length}
        if self.fraction is None:
            rope.only(_PARTIAL, 1, 1.0)
        else:
            fields["rope_fraction"] = rope.take(_PARTIAL, float, beside[_PARTIAL])
        names = {"su": "longrope"} if "longrope" in self.kinds else {}  # what the first Phi-3 files say
        rope.only("rope_type", "default", *self.kinds, *names)
        named = rope.take("rope_type", str, "default")
        rope.only("type", named)
        kind = names.get(named, named)
        if self.tables == "growth":
            rope.unused("max_position_embeddings")
            fields["rope_query_growth"] = rope.take(_GROWTH, float)
            fields["rope_original_len"] = rope.take(_LENGTH, int, length)
        if kind in _READERS:
            fields |= {"rope_scaling": kind} | _READERS[kind](rope, length, beside)
        rope.finish()
        return fields

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        dynamic, scaling = model.rope_scaling == "dynamic", _write_scaling(model)
        keys: dict[str, Any] = {
            "max_position_embeddings": model.rope_original_len if dynamic else model.max_seq_len,
            "rope_scaling": scaling,
            "rope_theta": model.rope_theta,
        }
        if self.fraction is not None:
            keys[_PARTIAL] = model.rope_fraction
        if model.rope_scaling == "longrope":
            keys[_LENGTH] = model.rope_original_len
        table = (scaling or {"rope_type": "default"}) | {"rope_theta": model.rope_theta}
        if self.tables == "growth":  # with less, transformers takes a default that is not plain
            growth = {_GROWTH: model.rope_query_growth, _LENGTH: model.rope_original_len}
            return {"max_position_embeddings": model.max_seq_len, "rope_parameters": table | growth}
        if self.tables == "one":
            return keys
        local = model.rope_local_theta
        if local is None and scaling is not None and model.sliding_window is not None:
            raise ConfigurationError(
                f"model.rope_local_theta = None beside rope_scaling = {model.rope_scaling!r}, but in this "
                "family the layers with a window are never scaled"
            )
        local = model.rope_theta if local is None else local
        if self.tables == "local":
            return keys | {"rope_local_base_freq": local}
        return keys | {
            "rope_parameters": {FULL: table, SLIDING: {"rope_type": "default", "rope_theta": local}}
        }

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        del model
        has = {
            "rope_fraction": self.fraction is not None,
            "rope_local_theta": self.tables in ("two", "local"),
            "rope_query_growth": self.tables == "growth",
        }
        free = (name for name in _OF_SCALING if name not in _FEATURES or has.get(name))
        kinds = {"rope_scaling": ("none", *self.kinds)}
        return dict.fromkeys(("max_seq_len", *free), ANY) | kinds


def _read_dynamic(rope: ConfigKeys, length: int) -> dict[str, Any]:
    """Here max_position_embeddings is the context before its extension, which has no end of its own."""
    factor = rope.take("factor", float)
    return {"rope_factor": factor, "rope_original_len": length, "max_seq_len": round(factor * length)}


def _read_yarn(rope: ConfigKeys, length: int) -> dict[str, Any]:
    rope.only("truncate", True)
    factor, original = rope.take("factor", float), rope.take(_LENGTH, int, length)
    scales = [rope.take(name, float, 0.0) for name in ("mscale", "mscale_all_dim")]
    amplitude = rope.take("attention_factor", float, None)
    if amplitude is None and all(scales):
        amplitude = yarn_amplitude(factor, scales[0]) / yarn_amplitude(factor, scales[1])
    return {
        "rope_factor": factor,
        "rope_original_len": original,
        "rope_beta_fast": rope.take("beta_fast", float, 32.0),
        "rope_beta_slow": rope.take("beta_slow", float, 1.0),
        "rope_attention_factor": amplitude,
    }


def _read_longrope(rope: ConfigKeys, length: int, beside: Mapping[str, Any]) -> dict[str, Any]:
    """The length before the extension is a key of its own beside the table."""
    original = beside[_LENGTH]
    rope.only(_LENGTH, original)
    return {
        "rope_original_len": original,
        "rope_factor": rope.take("factor", float, max(length / max(original, 1), 1.0)),
        "rope_attention_factor": rope.take("attention_factor", float, None),
        "rope_short_factors": _numbers(rope, "short_factor"),
        "rope_long_factors": _numbers(rope, "long_factor"),
    }


def _numbers(rope: ConfigKeys, name: str) -> tuple[float, ...]:
    values = rope.take(name, list)
    if not all(type(value) in (int, float) for value in values):
        raise ConfigurationError(f"{name} = {short(values)} should be numbers")
    return tuple(map(float, values))


_READERS: dict[str, Callable[[ConfigKeys, int, Mapping[str, Any]], dict[str, Any]]] = {
    "linear": lambda rope, *_: {"rope_factor": rope.take("factor", float)},
    "llama3": lambda rope, *_: {
        ours: rope.take(name, int if name == _LENGTH else float) for name, ours in _LLAMA3.items()
    },
    "dynamic": lambda rope, length, _: _read_dynamic(rope, length),
    "yarn": lambda rope, length, _: _read_yarn(rope, length),
    "longrope": _read_longrope,
}


def _write_scaling(model: GPTConfig) -> dict[str, Any] | None:
    kind, factor = {"rope_type": model.rope_scaling}, {"factor": model.rope_factor}
    amplitude, original = model.rope_attention_factor, {_LENGTH: model.rope_original_len}
    given = {} if amplitude is None else {"attention_factor": amplitude}
    if model.rope_scaling == "none":
        return None
    if model.rope_scaling == "llama3":
        return kind | {name: getattr(model, ours) for name, ours in _LLAMA3.items()}
    if model.rope_scaling == "yarn":
        betas = {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
        return kind | factor | betas | given | original
    if model.rope_scaling == "longrope":
        known = model.rope_factor == max(model.max_seq_len / model.rope_original_len, 1.0)
        lists = {"short_factor": list(model.rope_short_factors), "long_factor": list(model.rope_long_factors)}
        return kind | lists | given | original | ({} if known else factor)
    return kind | factor
