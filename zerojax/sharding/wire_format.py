"""Wire formats: how rows of numbers are encoded while they cross a mesh axis.

"fp32" and "bf16" travel as arrays of that dtype; the quantized formats as bytes, codes first and then scales,
encoded by ``pallas_kernels``; "e4m3" as the bytes that fp8 products read (``zerojax.matmul.fp8``), whose
scale every device has; "nf4" as the bytes that frozen weights are stored in, which can be gathered but
neither summed nor changed: kernels refuse that. All functions work on rows, one for each peer.
"""

import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num, UInt32

import pallas_kernels
from zerojax.errors import ConfigurationError
from zerojax.matmul import fp8
from zerojax.zero_config.options import Rounding

E4M3 = "e4m3"
_RAW_DTYPE = {"fp32": jnp.float32, "bf16": jnp.bfloat16, E4M3: jnp.uint8}
Seed = UInt32[Array, ""]
_inlined = functools.partial(jax.jit, inline=True)
"""For functions that a program calls hundreds of times: JAX traces them once for equal shapes."""


def mix(seed: Seed, *salts: int | Array) -> Seed:
    """Fold ``salts`` (step, leaf, hop, device...) into a 32-bit seed: a counter hash, no state.

    Each salt goes through the finaliser of MurmurHash3, so neighbouring counters give unrelated seeds.
    """
    for salt in salts:
        seed = _folded(seed, jnp.asarray(salt).astype(jnp.uint32))
    return seed


@_inlined
def _folded(seed: Seed, salt: Seed) -> Seed:
    value = seed ^ (salt * jnp.uint32(0x9E3779B9))
    value = (value ^ (value >> 16)) * jnp.uint32(0x85EBCA6B)
    value = (value ^ (value >> 13)) * jnp.uint32(0xC2B2AE35)
    return value ^ (value >> 16)


@dataclass(frozen=True)
class Codec:
    """One wire format with its settings.

    Attributes:
        fmt: "fp32", "bf16", "fp8", "int8", "fp6", "int4" or "int2"; or "e4m3", codes of fp8 matmuls with one
            scale per weight; or "nf4", which is only for storage.
        block: elements that share a scale (unused by the raw formats).
        rounding: "nearest" or "stochastic".
        stored: whether the format only stores frozen weights: it has ``encode`` and ``decode`` alone.
        raw: whether the format is a plain dtype without scales.
        dtype: the dtype on the wire.

    Raises:
        ConfigurationError: "nf4" with stochastic rounding.
    """

    fmt: str
    block: int
    rounding: Rounding = "nearest"
    stored: bool = field(init=False, compare=False, repr=False)
    raw: bool = field(init=False, compare=False, repr=False)
    dtype: jnp.dtype = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        stored = self.fmt in pallas_kernels.STORED
        if stored and self.rounding != "nearest":
            raise ConfigurationError(f'{self.fmt} rounds to nearest only: leave rounding="nearest".')
        dtype = jnp.dtype(_RAW_DTYPE.get(self.fmt, jnp.uint8))
        vars(self).update(stored=stored, raw=self.fmt in _RAW_DTYPE, dtype=dtype)

    def row_items(self, n: int) -> int:
        """How many items of ``dtype`` a row of ``n`` elements takes, scales included."""
        if self.raw:
            return n
        if self.stored:
            return pallas_kernels.nf4_bytes(n, self.block)
        return pallas_kernels.nbytes(self.fmt, n, self.block)

    def row_bytes(self, n: int) -> int:
        """How many bytes a row of ``n`` elements takes on the wire, scales included."""
        return self.row_items(n) * self.dtype.itemsize

    def encode(
        self, x: Float[Array, "rows n"], *, seed: Seed | None = None, rotation: int = 0
    ) -> Num[Array, "rows m"]:
        """Encode rows for the wire, as bytes or the raw ``dtype``; only stochastic rounding reads ``seed``.

        Raises:
            ConfigurationError: ``rotation`` is not 0, and the format only stores weights.
        """
        if self.fmt == E4M3:
            return x if x.dtype == self.dtype else fp8.encode(x)
        if self.raw:
            return x.astype(self.dtype)
        if self.stored:
            if rotation:
                raise ConfigurationError(f"{self.fmt} stores weights as they are: pass rotation=0.")
            return pallas_kernels.encode_nf4(x, block=self.block)
        return pallas_kernels.encode(
            x, self.fmt, block=self.block, rounding=self.rounding, rotation=rotation, seed=seed
        )

    def decode(self, payload: Num[Array, "rows m"], n: int, dtype: jnp.dtype) -> Float[Array, "rows n"]:
        """Decode rows as ``dtype``; they stay rotated if they were encoded so."""
        if self.fmt == E4M3:
            return fp8.decode(payload, dtype)
        if self.raw:
            return payload.astype(dtype)
        if self.stored:
            return pallas_kernels.decode_nf4(payload, n, block=self.block, dtype=dtype)
        return pallas_kernels.decode(payload, self.fmt, n, block=self.block, dtype=dtype)

    def decode_sum(self, payload: Num[Array, "peers m"], n: int, *, rotation: int = 0) -> Float[Array, " n"]:
        """The fp32 sum over peers in their order, rotated back."""
        if self.raw:
            return sum_rows(payload)
        return pallas_kernels.decode_sum(payload, self.fmt, n, block=self.block, rotation=rotation)

    def decode_sum_encode(
        self,
        payload: Num[Array, "peers m"],
        out: "Codec",
        rows: int,
        n: int,
        *,
        seed: Seed,
        rotation: int = 0,
    ) -> Num[Array, "rows k"]:
        """Sum over peers in fp32 between two hops, and encode again as ``rows`` rows of ``n`` elements.

        Rotated values stay so if both formats are quantized. Otherwise the quantized one rotates by itself.
        """
        if self.raw or out.raw:
            total = self.decode_sum(payload, rows * n, rotation=rotation)
            return out.encode(total.reshape(rows, n), seed=seed, rotation=rotation)
        return pallas_kernels.decode_sum_encode(
            payload, self.fmt, out.fmt, rows, n, block=self.block, rounding=out.rounding, seed=seed
        )

    def encode_delta(self, x: Float[Array, "rows n"], base: Float[Array, "rows n"]) -> Num[Array, "rows m"]:
        """Encode the difference ``x - base``, computed in fp32."""
        if self.raw:
            return (x - base.astype(jnp.float32)).astype(self.dtype)
        return pallas_kernels.encode_delta(x, base, self.fmt, block=self.block)

    def decode_add(
        self, payload: Num[Array, "rows m"], base: Float[Array, "rows n"]
    ) -> Float[Array, "rows n"]:
        """``base`` plus the decoded difference, added in fp32 and rounded once to ``base.dtype``."""
        if self.raw:
            total = base.astype(jnp.float32) + payload.astype(jnp.float32)
            return total.astype(base.dtype)
        return pallas_kernels.decode_add(payload, base, self.fmt, block=self.block)


@_inlined
def sum_rows(rows: Num[Array, "peers n"]) -> Float[Array, " n"]:
    """The fp32 sum over the leading axis, in index order, which gives the same bits on every backend."""
    total = rows[0].astype(jnp.float32)
    for row in rows[1:]:
        total = total + row.astype(jnp.float32)
    return total
