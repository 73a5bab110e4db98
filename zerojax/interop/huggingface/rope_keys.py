"""Rotary positions in config.json: ``rope_theta`` and ``rope_scaling``, or only ``rope_parameters``.

transformers 5 writes ``rope_parameters``. zerojax reads both forms and writes the older one, which version 5
reads as well.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.config_keys import REQUIRED, ConfigKeys
from zerojax.interop.huggingface.config_table import (
    ANY,
    Entry,
    Fields,
    Table,
    key,
    only,
    read_fields,
    unused,
    write_keys,
)
from zerojax.interop.huggingface.layer_types import FULL, SLIDING
from zerojax.models.config import GPTConfig
from zerojax.models.rope import rope_amplitude, yarn_amplitude
from zerojax.validation.untrusted import short

_SCALE, _ALL = "mscale", "mscale_all_dim"
_LENGTH, _PARTIAL = "original_max_position_embeddings", "partial_rotary_factor"
# Fields of single kinds of scaling, and fields that are features of a family.
_OF_SCALING = tuple(field.name for field in fields(GPTConfig) if field.name.startswith("rope_"))
_FEATURES = ("rope_fraction", "rope_interleaved", "rope_local_theta", "rope_query_growth")
_COMMON = ("linear", "llama3", "dynamic", "yarn")


def _length(_: ConfigKeys, found: Fields) -> int:
    return found["max_seq_len"]


def _extended(_: ConfigKeys, found: Fields) -> Fields:
    """Read max_position_embeddings as the original context; "dynamic" extends it by the factor."""
    length = found["max_seq_len"]
    return {"rope_original_len": length, "max_seq_len": round(found["rope_factor"] * length)}


def _yarn_amplitude(rope: ConfigKeys, found: Fields) -> float | None:
    scales = [rope.take(name, float, 0.0) for name in (_SCALE, _ALL)]
    if not all(scales):
        return None
    first, second = (yarn_amplitude(found["rope_factor"], scale) for scale in scales)
    return first / second


def _longrope_factor(_: ConfigKeys, found: Fields) -> float:
    return max(found["max_seq_len"] / max(found["rope_original_len"], 1), 1.0)


def _unless_known(model: GPTConfig) -> float | None:
    known = model.rope_factor == max(model.max_seq_len / model.rope_original_len, 1.0)
    return None if known else model.rope_factor


def _numbers(name: str, field: str) -> Entry:
    def decode(values: list[Any], _: Fields) -> tuple[float, ...]:
        if not all(type(value) in (int, float) for value in values):
            raise ConfigurationError(f"{name} = {short(values)} should be numbers")
        return tuple(map(float, values))

    return key(name, field, list, decode=decode, written=lambda model: list(getattr(model, field)))


_FACTOR = key("factor", "rope_factor", float)
_SCALING: dict[str, Table] = {
    "linear": (_FACTOR,),
    "llama3": (
        _FACTOR,
        key("low_freq_factor", "rope_low_freq_factor", float),
        key("high_freq_factor", "rope_high_freq_factor", float),
        key(_LENGTH, "rope_original_len"),
    ),
    "dynamic": (_FACTOR, Entry(_extended)),
    "yarn": (
        _FACTOR,
        key(
            "truncate",
            "rope_truncate",
            bool,
            True,
            written=lambda model: None if model.rope_truncate else False,
        ),
        key(_LENGTH, "rope_original_len", int, _length),
        key("beta_fast", "rope_beta_fast", float, 32.0),
        key("beta_slow", "rope_beta_slow", float, 1.0),
        key("attention_factor", "rope_attention_factor", float, _yarn_amplitude),
    ),
    "longrope": (
        # The original context's length is a separate key beside the table.
        Entry(
            lambda rope, found: rope.only(_LENGTH, found["rope_original_len"]),
            lambda model: {_LENGTH: model.rope_original_len},
        ),
        key("factor", "rope_factor", float, _longrope_factor, written=_unless_known),
        key("attention_factor", "rope_attention_factor", float, None),
        _numbers("short_factor", "rope_short_factors"),
        _numbers("long_factor", "rope_long_factors"),
    ),
    "proportional": (
        key(
            "factor",
            "rope_factor",
            float,
            1.0,
            written=lambda model: None if model.rope_factor == 1 else model.rope_factor,
        ),
        key(_PARTIAL, "rope_fraction", float, 1.0),
    ),
}
"""The keys of each kind of scaling in a table of rotary parameters. Keys that are None are not written."""
_GROWTH = (
    unused("max_position_embeddings"),
    key("llama_4_scaling_beta", "rope_query_growth", float),
    key(_LENGTH, "rope_original_len", int, _length),
)
"""Ministral 3's growth of queries, in the same table."""


def _scales(model: GPTConfig) -> dict[str, float | None]:
    """YaRN's two scales, which give both the amplitude and DeepSeek's factor of the scores.

    transformers reads a scale of 0 as no scale. If one is 0, the amplitude is written itself.
    """
    if model.query_scalar is None or model.rope_factor <= 1:
        return {}
    factor = (model.head_dim / model.query_scalar) ** 0.25

    def scale_of(amplitude: float) -> float:
        """The inverse of ``yarn_amplitude``, without the rounding of powers."""
        return float(f"{10 * (amplitude - 1) / math.log(model.rope_factor):.12g}")

    amplitude = rope_amplitude(model)
    scales = {_SCALE: scale_of(factor * amplitude), _ALL: scale_of(factor)}
    return scales | {"attention_factor": None if all(scales.values()) else amplitude}


def _stretched(values: dict[str, Any], theta: float, width: int) -> dict[str, Any]:
    """A table with HunYuan's alpha replaced by a larger theta. That effect does not depend on the length."""
    table = ConfigKeys(values, "rope_parameters")
    if not (alpha := table.take("alpha", float, 0.0)):
        return values
    theta = table.take("rope_theta", float, theta)
    for name in ("type", "rope_type"):
        table.only(name, "dynamic")
    table.unused("factor", "beta_fast", "beta_slow", _SCALE, _ALL)
    table.finish("rope_parameters with an alpha have no such keys")
    if alpha < 0 or width <= 2:
        raise ConfigurationError(f"alpha = {alpha} is not supported for heads of {width}")
    return {"rope_type": "default", "rope_theta": theta * alpha ** (width / (width - 2))}


@dataclass(frozen=True)
class Rope:
    """Entry for a model's rotary fields and max_seq_len.

    Attributes:
        theta: default of rope_theta.
        kinds: kinds of scaling, besides none.
        fraction: default of partial_rotary_factor; None if the family has no such key.
        tables: "one" is a table for all layers. "explicit" is one that must be present. "two" is one for
            layers with a window, one for the others. "layers" is these two, without other keys. "local" is
            two, where the first has a separate key. "growth" is one, with Ministral 3's growth of queries.
        scores: whether mscale_all_dim also scales the attention scores (DeepSeek).
        alpha: whether "dynamic" may have an alpha that stretches theta (HunYuan).
        length: default of max_position_embeddings.
        names: the keys of theta and of the fraction.
        sections: whether pairs may be divided between a token's positions in time, height and width, which
            are the same for text (Qwen3.5).
        default: rope_parameters of files without that key.
    """

    theta: float = 10000.0
    kinds: tuple[str, ...] = _COMMON
    fraction: float | None = None
    tables: Literal["one", "explicit", "two", "layers", "local", "growth"] = "one"
    scores: bool = False
    alpha: bool = False
    length: Any = REQUIRED
    names: tuple[str, str] = ("rope_theta", _PARTIAL)
    sections: bool = False
    default: Mapping[str, Any] = field(default_factory=dict)

    def read(self, keys: ConfigKeys, found: Fields) -> Fields:
        """See ``Entry``."""
        theta = keys.take(self.names[0], float, self.theta)
        length = keys.take("max_position_embeddings", int, self.length)
        before = {"max_seq_len": length, "rope_theta": theta}
        needed = REQUIRED if self.tables == "growth" else dict(self.default)
        table, scaling = keys.take("rope_parameters", dict, needed), keys.take("rope_scaling", dict, {})
        if self.fraction is not None:
            before["rope_fraction"] = keys.take(self.names[1], float, self.fraction)
        if self.scores:
            before["head_width"] = found["head_width"]
        if "longrope" in self.kinds:
            before["rope_original_len"] = keys.take(_LENGTH, int, 4096)
        if self.tables == "explicit" and not (scaling or table):
            raise ConfigurationError("rope_scaling or rope_parameters is missing")
        if self.alpha:
            width = found.get("head_width") or found["d_model"] // max(found["heads"], 1)
            scaling, table = {}, _stretched(scaling | table, theta, width)
        if self.tables in ("one", "explicit", "growth"):
            return self._read_table(scaling | table, before)
        if unknown := sorted(table.keys() - {FULL, SLIDING}):
            raise ConfigurationError(f"rope_parameters of {', '.join(unknown)} are not supported")
        local = keys.take("rope_local_base_freq", float, 10000.0) if self.tables == "local" else theta
        windowed = self._read_table(table.get(SLIDING) or {}, before | {"rope_theta": local})
        if "rope_scaling" in windowed:
            raise ConfigurationError(
                f"rope_type = {windowed['rope_scaling']!r} of {SLIDING} is not supported"
            )
        full = self._read_table((table.get(FULL) or {}) | scaling, before)
        alike = "rope_scaling" not in full and full["rope_theta"] == windowed["rope_theta"]
        return full | {"rope_local_theta": None if alike else windowed["rope_theta"]}

    def _read_table(self, values: dict[str, Any], before: Fields) -> dict[str, Any]:
        """The fields of one table of rotary parameters, added to ``before``."""
        if values.get("rope_type") is None:  # its name was "type" before transformers 4.43
            values = values | {"rope_type": values.get("type")}
        rope = ConfigKeys(values, "rope_parameters")
        names = {"su": "longrope"} if "longrope" in self.kinds else {}  # "su" in the first Phi-3 files
        rope.only("rope_type", "default", *self.kinds, *names)
        named: str = rope.take("rope_type", str, "default")
        rope.only("type", named)
        kind = names.get(named, named)
        if kind != "longrope":
            before = {name: value for name, value in before.items() if name != "rope_original_len"}
        plain = only(_PARTIAL, 1, 1.0)
        partial = key(_PARTIAL, "rope_fraction", float, lambda _, found: found["rope_fraction"])
        table = [
            key("rope_theta", "rope_theta", float, lambda _, found: found["rope_theta"]),
            *(() if kind == "proportional" else (plain if self.fraction is None else partial,)),
            *(_GROWTH if self.tables == "growth" else ()),
            *_SCALING.get(kind, ()),
        ]
        scaling = {"rope_scaling": kind} if kind in _SCALING else {}
        found = read_fields(table, rope, before)
        if self.scores and kind == "yarn" and (scale := rope.take(_ALL, float, 0.0)):
            factor = yarn_amplitude(found["rope_factor"], scale)
            found["query_scalar"] = found["head_width"] / factor**4
        if self.sections:
            rope.unused("mrope_section", "mrope_interleaved")
        rope.finish()
        return found | scaling

    def write(self, model: GPTConfig) -> Mapping[str, Any]:
        """See ``Entry``."""
        kind, scaling = model.rope_scaling, None
        if kind != "none":
            written = write_keys(_SCALING[kind], model)
            if self.scores and kind == "yarn":
                written |= _scales(model)
            scaling = {"rope_type": kind, **{name: x for name, x in written.items() if x is not None}}
        table = (scaling or {"rope_type": "default"}) | {"rope_theta": model.rope_theta}
        if self.tables == "growth":  # without all keys transformers takes a default that scales
            table |= write_keys(_GROWTH, model)
            return {"max_position_embeddings": model.max_seq_len, "rope_parameters": table}
        keys: dict[str, Any] = {
            "max_position_embeddings": model.rope_original_len if kind == "dynamic" else model.max_seq_len,
            "rope_scaling": scaling,
            self.names[0]: model.rope_theta,
        }
        if self.fraction is not None:
            keys[self.names[1]] = model.rope_fraction
        if kind == "longrope":
            keys[_LENGTH] = model.rope_original_len
        if self.tables == "explicit":  # without a table transformers takes a default that scales
            return keys | {"rope_scaling": scaling or {"rope_type": "default"}}
        if self.tables == "one":
            return keys
        local = model.rope_local_theta
        if local is None and scaling is not None and model.sliding_window is not None:
            raise ConfigurationError(
                f"model.rope_local_theta = None with rope_scaling = {kind!r}, but this family never scales "
                "the layers with a window"
            )
        local = model.rope_theta if local is None else local
        if self.tables == "local":
            return keys | {"rope_local_base_freq": local}
        tables = {FULL: table, SLIDING: {"rope_type": "default", "rope_theta": local}}
        if self.tables == "layers":
            return {"max_position_embeddings": model.max_seq_len, "rope_parameters": tables}
        return keys | {"rope_parameters": tables}

    def allowed(self, model: GPTConfig) -> Mapping[str, object]:
        """See ``Entry``."""
        has = {
            "rope_fraction": self.fraction is not None or model.rope_scaling == "proportional",
            "rope_local_theta": self.tables in ("two", "layers", "local"),
            "rope_query_growth": self.tables == "growth",
        }
        free = (name for name in _OF_SCALING if name not in _FEATURES or has.get(name))
        kinds: dict[str, object] = {"rope_scaling": ("none", *self.kinds)}
        if self.scores and model.rope_scaling == "yarn":
            kinds["query_scalar"] = ANY
        return dict.fromkeys(("max_seq_len", *free), ANY) | kinds
