"""Rotary positions (Su et al., 2021) and how their wavelengths are stretched for longer contexts."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from zerojax.models.config import GPTConfig, RopeScaling

RopeTable = tuple[Float[Array, "*batch time half"], Float[Array, "*batch time half"]]


def rope_frequencies(config: GPTConfig, length: int | Int[Array, ""]) -> Float[Array, " half"]:
    """The angle by which each pair of a head is rotated per position, in radians, fp32.

    Pair i is rotated by theta^(-2i/head_dim) (Su et al., 2021, eq. 15), which each kind of rope_scaling
    changes as transformers does.

    Args:
        config: of the model.
        length: tokens of the sequence, on which "dynamic" depends.
    """
    return _SCALINGS[config.rope_scaling](config, length)


def _plain(c: GPTConfig, theta: float | Array) -> Array:
    exponents = jnp.arange(0, c.head_dim, 2, dtype=jnp.float32) / c.head_dim
    return 1.0 / theta**exponents


def _linear(c: GPTConfig) -> Array:
    """All angles divided by rope_factor (Chen et al., 2023)."""
    return _plain(c, c.rope_theta) / c.rope_factor


def _llama3(c: GPTConfig) -> Array:
    """The angles of long wavelengths divided by rope_factor, as in Meta's release of LLaMA 3.1.

    Those of wavelengths above rope_original_len / rope_low_freq_factor are divided, those below
    rope_original_len / rope_high_freq_factor are kept, and those in between interpolated.
    """
    plain = _plain(c, c.rope_theta)
    turns = c.rope_original_len * plain / (2 * jnp.pi)  # in the original context
    low, high = c.rope_low_freq_factor, c.rope_high_freq_factor
    kept = jnp.clip((turns - low) / (high - low), 0, 1)
    return (1 - kept) * plain / c.rope_factor + kept * plain


def _dynamic(c: GPTConfig, length: int | Array) -> Array:
    """NTK-aware: theta grows with the sequence beyond rope_original_len (Peng et al., 2023, section 3.3)."""
    excess = jnp.maximum(c.rope_factor * length / c.rope_original_len - (c.rope_factor - 1), 1.0)
    return _plain(c, c.rope_theta * excess ** (c.head_dim / (c.head_dim - 2)))


def _yarn(c: GPTConfig) -> Array:
    """YaRN (Peng et al., 2023, sections 3.2 and A.1): divides the angles of pairs that turn rarely.

    Pairs that turn rope_beta_fast times or more in the original context are kept, those that turn
    rope_beta_slow times or less are divided by rope_factor, and those in between interpolated by index.
    """

    def index_of(turns: float) -> float:
        """The index of the pair that turns so often in the original context."""
        ratio = c.rope_original_len / (turns * 2 * math.pi)
        return c.head_dim * math.log(ratio) / (2 * math.log(c.rope_theta))

    first = max(math.floor(index_of(c.rope_beta_fast)), 0)
    last = min(math.ceil(index_of(c.rope_beta_slow)), c.head_dim - 1)
    span = last - first if last != first else 0.001
    divided = jnp.clip((jnp.arange(c.head_dim // 2, dtype=jnp.float32) - first) / span, 0, 1)
    plain = _plain(c, c.rope_theta)
    return divided * plain / c.rope_factor + (1 - divided) * plain


_SCALINGS: dict[RopeScaling, Callable[[GPTConfig, int | Array], Array]] = {
    "none": lambda c, length: _plain(c, c.rope_theta),
    "linear": lambda c, length: _linear(c),
    "llama3": lambda c, length: _llama3(c),
    "dynamic": _dynamic,
    "yarn": lambda c, length: _yarn(c),
}


def rope_amplitude(config: GPTConfig) -> float:
    """What cosines and sines are multiplied by: YaRN's 1 + 0.1 ln(rope_factor), or rope_attention_factor."""
    if config.rope_scaling != "yarn":
        return 1.0
    if config.rope_attention_factor is not None:
        return config.rope_attention_factor
    return yarn_amplitude(config.rope_factor)


def yarn_amplitude(factor: float, scale: float = 1.0) -> float:
    """1 + 0.1 scale ln(factor), and 1 below factor 1 (Peng et al., 2023, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def rope_tables(
    config: GPTConfig, positions: Int[Array, "*batch time"], length: int | Int[Array, " batch"]
) -> RopeTable:
    """The table of a model; with rope_local_theta that of full layers and that of windowed ones, stacked.

    Args:
        config: of the model.
        positions: of the tokens.
        length: tokens of all sequences, or of each.
    """
    amplitude = rope_amplitude(config)
    if config.rope_scaling == "dynamic" and jnp.ndim(length):
        table = jax.vmap(lambda own, n: rope_table(own, rope_frequencies(config, n), amplitude))(
            positions, length
        )
    else:
        table = rope_table(positions, rope_frequencies(config, length), amplitude)
    if config.rope_local_theta is None:
        return table
    local = rope_table(positions, _plain(config, config.rope_local_theta))
    return jnp.stack([table[0], local[0]]), jnp.stack([table[1], local[1]])


def rope_table(
    positions: Int[Array, "*batch time"], frequencies: Float[Array, " half"], amplitude: float = 1.0
) -> RopeTable:
    """The cosines and sines of the rotary embedding, times an amplitude, fp32."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * amplitude, jnp.sin(angles) * amplitude


def apply_rope(
    x: Float[Array, "batch time heads dim"], table: RopeTable
) -> Float[Array, "batch time heads dim"]:
    """Rotate each pair (x[i], x[i + dim/2]) by its position's angle, computed in fp32, returned in x's dtype.

    Pairing the halves rather than neighbours is LLaMA's convention in Hugging Face checkpoints.
    """
    # The table depends on no parameter; without this a scanned stack would accumulate a gradient for it.
    cos, sin = (jax.lax.stop_gradient(t)[..., None, :] for t in table)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return turned.astype(x.dtype)
