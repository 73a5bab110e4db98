"""Rotary positions (Su et al., 2021), and the stretching of their wavelengths for longer contexts."""

import math
from collections.abc import Callable
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from zerojax.models.config import GPTConfig
from zerojax.models.options import RopeScaling, Rotation

RopeTable = tuple[Float[Array, "*batch time half"], Float[Array, "*batch time half"]]


class Rope(NamedTuple):
    """The rotary positions of some tokens, for all layers of a model.

    Attributes:
        cos: cosines of the angles; where layers differ, the tables of all ``rope_kinds``, stacked.
        sin: sines, in the same shape.
        query_scale: factor of each position's query, if the model has one.
    """

    cos: Float[Array, "*kinds batch time half"]
    sin: Float[Array, "*kinds batch time half"]
    query_scale: Float[Array, "*batch time"] | None

    def table(self, kind: int | Int[Array, ""] | None) -> RopeTable:
        """The cosines and sines for a kind of layer; ``kind`` is None if all layers share one table."""
        return (self.cos, self.sin) if kind is None else (self.cos[kind], self.sin[kind])

    def by_token(self, kind: int | Int[Array, ""] | None, rows: int) -> "Rope":
        """One kind's table, with a leading axis of ``rows`` rows in all arrays."""

        def of_rows(x: Array, axes: int) -> Array:
            return jnp.broadcast_to(x, (rows, *x.shape[-axes:]))

        cos, sin = self.table(kind)
        scale = None if self.query_scale is None else of_rows(self.query_scale, 1)
        return Rope(of_rows(cos, 2), of_rows(sin, 2), scale)


def rope_kinds(config: GPTConfig) -> tuple[int, ...]:
    """The index of each layer's table in ``Rope``."""
    return tuple(map(_kinds(config).index, config.rotations))


def _kinds(config: GPTConfig) -> list[Rotation]:
    return [kind for kind in get_args(Rotation) if kind in config.rotations]


def rope_frequencies(config: GPTConfig, length: int | Int[Array, "*batch #time"]) -> Float[Array, "... half"]:
    """The rotation of each pair of a head per position, in radians, fp32.

    Pair i is rotated by theta^(-2i/rope_width) (Su et al., 2021, eq. 15). Each kind of rope_scaling changes
    that as in transformers. "dynamic" and "longrope" depend on ``length``, the tokens of the sequence: one
    number, or one for each row or position.
    """
    by_angle = length if isinstance(length, int) or length.ndim == 0 else length[..., None]
    return _SCALINGS[config.rope_scaling](config, by_angle)


def _plain(c: GPTConfig, theta: float | Array) -> Array:
    exponents = jnp.arange(0, c.rope_width, 2, dtype=jnp.float32) / c.rope_width
    return 1.0 / theta**exponents


def _llama3(c: GPTConfig) -> Array:
    """Divide the angles of long wavelengths by rope_factor, as in Meta's release of LLaMA 3.1.

    Wavelengths above rope_original_len / rope_low_freq_factor are divided in full, and wavelengths below
    rope_original_len / rope_high_freq_factor are kept. Between the two bounds the angles are interpolated.
    """
    plain = _plain(c, c.rope_theta)
    turns = c.rope_original_len * plain / (2 * jnp.pi)  # in the original context
    low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * plain / c.rope_factor + kept * plain


def _dynamic(c: GPTConfig, length: int | Array) -> Array:
    """NTK-aware: theta grows with the sequence beyond rope_original_len (Peng et al., 2023, section 3.3)."""
    excess = jnp.maximum(c.rope_factor * length / c.rope_original_len - (c.rope_factor - 1), 1.0)
    return _plain(c, c.rope_theta * excess ** (c.rope_width / (c.rope_width - 2)))


def _yarn(c: GPTConfig) -> Array:
    """YaRN (Peng et al., 2023, sections 3.2 and A.1): divide the angles of pairs that turn rarely.

    Pairs with at least rope_beta_fast turns in the original context are kept. Pairs with at most
    rope_beta_slow turns are divided by rope_factor. Between them the angles are interpolated by index.
    """

    def index_of(turns: float) -> float:
        """The index of the pair with this many turns in the original context."""
        ratio = c.rope_original_len / (turns * 2 * math.pi)
        return c.rope_width * math.log(ratio) / (2 * math.log(c.rope_theta))

    first, last = index_of(c.rope_beta_fast), index_of(c.rope_beta_slow)
    if c.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, c.rope_width - 1)
    span = last - first if last != first else 0.001
    divided = jnp.clip((jnp.arange(c.rope_width // 2, dtype=jnp.float32) - first) / span, 0, 1)
    plain = _plain(c, c.rope_theta)
    return divided * plain / c.rope_factor + (1 - divided) * plain


def _proportional(c: GPTConfig) -> Array:
    """Pairs span the whole head, and the last ones, all but rope_fraction of them, are not rotated."""
    rotated = jnp.arange(c.rope_width // 2) < int(c.rope_fraction * c.head_dim // 2)
    return jnp.where(rotated, _plain(c, c.rope_theta) / c.rope_factor, 0)


def _longrope(c: GPTConfig, length: int | Array) -> Array:
    """Divide each angle by a separate factor (Ding et al., 2024); long sequences have other factors."""
    short, long = jnp.array(c.rope_short_factors), jnp.array(c.rope_long_factors)
    return _plain(c, c.rope_theta) / jnp.where(length > c.rope_original_len, long, short)


_SCALINGS: dict[RopeScaling, Callable[[GPTConfig, int | Array], Array]] = {
    "none": lambda c, length: _plain(c, c.rope_theta),
    "linear": lambda c, length: _plain(c, c.rope_theta) / c.rope_factor,  # Chen et al., 2023
    "llama3": lambda c, length: _llama3(c),
    "dynamic": _dynamic,
    "yarn": lambda c, length: _yarn(c),
    "longrope": _longrope,
    "proportional": lambda c, length: _proportional(c),
}


def rope_amplitude(config: GPTConfig) -> float:
    """The factor of cosines and sines: rope_attention_factor or its default."""
    c = config
    if c.rope_scaling not in ("yarn", "longrope"):
        return 1.0
    if c.rope_attention_factor is not None:
        return c.rope_attention_factor
    if c.rope_scaling == "yarn":
        return yarn_amplitude(c.rope_factor)
    return math.sqrt(1 + math.log(max(c.rope_factor, 1.0)) / math.log(c.rope_original_len))


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """1 + 0.1 scale ln(factor), or 1 for factors up to 1 (Peng et al., 2023, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_of(
    config: GPTConfig, positions: Int[Array, "*batch time"], length: int | Int[Array, "batch #time"]
) -> Rope:
    """The rotary positions of tokens. ``length``, in tokens, is as in ``rope_frequencies``."""
    tables = [_table(kind, config, positions, length) for kind in _kinds(config)]
    scale = None
    if config.rope_query_growth:
        scale = 1 + config.rope_query_growth * jnp.log1p((positions // config.rope_original_len) * 1.0)
    if len(tables) == 1:
        return Rope(*tables[0], scale)
    cos, sin = (jnp.stack(parts) for parts in zip(*tables, strict=True))
    return Rope(cos, sin, scale)


def _table(kind: Rotation, config: GPTConfig, positions: Array, length: int | Array) -> RopeTable:
    if kind == "none":
        plain = jnp.zeros((*positions.shape, config.rope_width // 2), jnp.float32)
        return plain + 1, plain
    if kind == "local":
        assert config.rope_local_theta is not None
        return rope_table(positions, _plain(config, config.rope_local_theta))
    amplitude = rope_amplitude(config)
    return rope_table(positions, rope_frequencies(config, length), amplitude)


def rope_table(
    positions: Int[Array, "*batch time"], frequencies: Float[Array, "... half"], amplitude: float = 1.0
) -> RopeTable:
    """Cosines and sines of the rotary embedding, times an amplitude, fp32."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def apply_rope(
    x: Float[Array, "batch time heads dim"], table: RopeTable, *, interleaved: bool = False
) -> Float[Array, "batch time heads dim"]:
    """Rotate each pair (x[i], x[i + half]) by its position's angle, in fp32; returns x's dtype.

    Hugging Face checkpoints of LLaMA pair the two halves. If interleaved, the pairs are (x[2 i], x[2 i + 1]).
    Elements beyond the table's pairs are unchanged.
    """
    # The table depends on no parameter. Without this a scanned stack would accumulate a gradient for it.
    cos, sin = (jax.lax.stop_gradient(t)[..., None, :] for t in table)
    width = 2 * cos.shape[-1]
    turned, rest = (x, None) if width == x.shape[-1] else (x[..., :width], x[..., width:])
    if interleaved:
        low, high = (turned.astype(jnp.float32)[..., i::2] for i in (0, 1))
    else:
        low, high = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    pair = low * cos - high * sin, high * cos + low * sin
    both = jnp.stack(pair, axis=-1).reshape(turned.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    both = both.astype(x.dtype)
    return both if rest is None else jnp.concatenate([both, rest], axis=-1)
