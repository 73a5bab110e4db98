"""The codec's public functions: they check their arguments and call the implementation for the platform.

They may be called eagerly, inside ``jit`` and inside ``shard_map(check_vma=False)``. None is differentiable.
``seed`` is a uint32 scalar array, which stochastic rounding requires.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import nf4_reference
from pallas_kernels.backends import dispatch
from pallas_kernels.formats import QUANTIZED, ROTATION, ROUNDINGS, AnyArray, check_block, nbytes, nf4_bytes


def encode(
    x: AnyArray,
    fmt: str,
    *,
    block: int | None = None,
    rounding: str = "nearest",
    rotation: int = 0,
    seed: AnyArray | None = None,
) -> jax.Array:
    """Encode rows of floating-point numbers.

    Args:
        x: [rows, n], any floating-point dtype.
        fmt: one of ``FORMATS``.
        block: elements that share a scale; see ``nbytes``.
        rounding: "nearest" or "stochastic". The raw formats always round to nearest.
        rotation: 32 to multiply every 32 neighbours by a Hadamard matrix first, or 0.
        seed: uint32 scalar, for stochastic rounding.

    Returns:
        uint8[rows, nbytes(fmt, n, block)].

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit.
    """
    _check_array("x", x, 2)
    check_block(fmt, x.shape[1], block)
    _check_rotation(x.shape[1], rotation)
    rounding, seed = _check_rounding(fmt, rounding, seed)
    static = {"fmt": fmt, "block": block, "rounding": rounding, "rotation": rotation}
    return dispatch("encode", x, seed, **static)


def encode_delta(
    w: AnyArray,
    base: AnyArray,
    fmt: str,
    *,
    block: int | None = None,
    rounding: str = "nearest",
    seed: AnyArray | None = None,
) -> jax.Array:
    """Encode w - base, both [rows, n], computed in fp32.

    Returns uint8[rows, nbytes(fmt, n, block)]. Arguments and errors are as for ``encode``. Encoding the
    change of ZeRO-3 weights is from SDP4Bit (arXiv:2410.15526, section 3.1).
    """
    _check_array("w", w, 2)
    _check_array("base", base, 2)
    if base.shape != w.shape:
        raise ValueError(f"base has shape {base.shape}, w has {w.shape}: they must agree")
    check_block(fmt, w.shape[1], block)
    rounding, seed = _check_rounding(fmt, rounding, seed)
    return dispatch("encode_delta", w, base, seed, fmt=fmt, block=block, rounding=rounding)


def encode_reordered(
    g: AnyArray,
    fmt: str,
    *,
    local: int,
    nodes: int,
    chunks: int = 1,
    block: int | None = None,
    rounding: str = "nearest",
    rotation: int = 0,
    seed: AnyArray | None = None,
) -> jax.Array:
    """Encode a padded gradient leaf in the order in which its pieces are sent.

    The flat leaf is viewed as [local, nodes, chunks, q]. For each local peer, chunk c has the q elements of
    every node. So after the hop inside the node, the input of the hop between nodes is contiguous (ZeRO++,
    arXiv:2306.10209, algorithm 2).

    Args:
        g: [local * nodes * chunks * q], any floating-point dtype, q a multiple of ``block``.
        fmt, block, rounding, rotation: as for ``encode``.
        local, nodes, chunks: the first three dimensions of the view.
        seed: as for ``encode``; the random bits of an element depend on its position in g.

    Returns:
        uint8[chunks, local, nbytes(fmt, nodes * q, block)].

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit.
    """
    _check_array("g", g, 1)
    pieces = local * nodes * chunks
    if min(local, nodes, chunks) < 1 or g.size % pieces:
        raise ValueError(
            f"{g.size} elements do not divide into local={local} * nodes={nodes} * chunks={chunks}: pad g"
        )
    q = g.size // pieces
    check_block(fmt, q, block)
    _check_rotation(q, rotation)
    rounding, seed = _check_rounding(fmt, rounding, seed)
    static = {"fmt": fmt, "local": local, "nodes": nodes, "chunks": chunks, "block": block}
    return dispatch("encode_reordered", g, seed, rounding=rounding, rotation=rotation, **static)


def decode(
    payload: AnyArray,
    fmt: str,
    n: int,
    *,
    block: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """Decode uint8[rows, nbytes(fmt, n, block)] into dtype[rows, n].

    Raises ValueError or TypeError if the payload does not hold rows of n elements in ``fmt``.
    """
    _check_payload(payload, nbytes(fmt, n, block))
    return dispatch("decode", payload, fmt=fmt, n=n, block=block, dtype=jnp.dtype(dtype))


def decode_add(payload: AnyArray, base: AnyArray, fmt: str, *, block: int | None = None) -> jax.Array:
    """Add decoded rows to ``base``, [rows, n], in fp32. The result has base's dtype.

    Raises ValueError or TypeError if the payload's rows do not have the shape of ``base``.
    """
    _check_array("base", base, 2)
    _check_payload(payload, nbytes(fmt, base.shape[1], block))
    if payload.shape[0] != base.shape[0]:
        raise ValueError(f"payload has {payload.shape[0]} rows, base {base.shape[0]}: pass equal numbers")
    return dispatch("decode_add", payload, base, fmt=fmt, block=block)


def decode_sum(
    payload: AnyArray,
    fmt: str,
    n: int,
    *,
    block: int | None = None,
    rotation: int = 0,
    scale: float = 1.0,
) -> jax.Array:
    """Decode uint8[peers, nbytes(fmt, n, block)] and sum the rows, in row order.

    Args:
        payload: one row per peer.
        fmt, block: as for ``decode``.
        n: elements of a row.
        rotation: of the encoded rows. It is undone after the sum.
        scale: a Python number to multiply the result by, such as 1/peers for a mean.

    Returns:
        fp32[n].

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit.
    """
    _check_payload(payload, nbytes(fmt, n, block))
    _check_rotation(n, rotation)
    static = {"fmt": fmt, "n": n, "block": block, "rotation": rotation, "scale": float(scale)}
    return dispatch("decode_sum", payload, **static)


def decode_sum_encode(
    payload: AnyArray,
    fmt_in: str,
    fmt_out: str,
    rows_out: int,
    n: int,
    *,
    block: int | None = None,
    rounding: str = "nearest",
    seed: AnyArray | None = None,
) -> jax.Array:
    """Between two hops: decode the peers' rows, sum them in fp32, and encode the sum.

    A rotation remains. Only the last ``decode_sum`` undoes it.

    Args:
        payload: uint8[peers, nbytes(fmt_in, rows_out * n, block)].
        fmt_in: wire format of the previous hop.
        fmt_out: wire format of the next hop.
        rows_out: rows of the sum, as the next hop sends it.
        n: elements of each row.
        block, rounding, seed: as for ``encode``.

    Returns:
        uint8[rows_out, nbytes(fmt_out, n, block)].

    Raises:
        ValueError, TypeError: shapes, dtypes or options do not fit.
    """
    _check_payload(payload, nbytes(fmt_in, rows_out * n, block))
    check_block(fmt_out, n, block)
    rounding, seed = _check_rounding(fmt_out, rounding, seed)
    static = {"fmt_in": fmt_in, "fmt_out": fmt_out, "rows_out": rows_out, "n": n, "block": block}
    return dispatch("decode_sum_encode", payload, seed, rounding=rounding, **static)


def encode_nf4(x: AnyArray, *, block: int = 64) -> jax.Array:
    """Encode rows of frozen weights in 4-bit NormalFloat with double quantization.

    The format is from QLoRA (Dettmers et al., 2023, arXiv:2305.14314, section 3);
    ``pallas_kernels.nf4_reference`` is its specification.

    Args:
        x: [rows, n], any floating-point dtype.
        block: elements that share a scale, a power of two from 64 to 2048; it divides n.

    Returns:
        uint8[rows, nf4_bytes(n, block)].

    Raises:
        ValueError, TypeError: shapes, dtypes or the block do not fit.
    """
    _check_array("x", x, 2)
    nf4_bytes(x.shape[1], block)
    return dispatch("encode_nf4", x, specification=nf4_reference, block=block)


def decode_nf4(payload: AnyArray, n: int, *, block: int = 64, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """Decode uint8[rows, nf4_bytes(n, block)] of ``encode_nf4`` into dtype[rows, n].

    Raises ValueError or TypeError if the payload does not hold rows of n elements in blocks of ``block``.
    """
    _check_payload(payload, nf4_bytes(n, block))
    static = {"n": n, "block": block, "dtype": jnp.dtype(dtype)}
    return dispatch("decode_nf4", payload, specification=nf4_reference, **static)


def _check_array(name: str, array: AnyArray, ndim: int, kind: DTypeLike = jnp.floating) -> None:
    """Raise ValueError or TypeError unless an argument has ``ndim`` dimensions and a dtype of a kind."""
    if array.ndim != ndim:
        raise ValueError(f"{name} has shape {array.shape}: pass an array of {ndim} dimensions")
    if not jnp.issubdtype(array.dtype, kind):
        wanted = "uint8" if kind == jnp.uint8 else "a floating-point array"
        raise TypeError(f"{name} has dtype {array.dtype}: pass {wanted}")


def _check_payload(payload: AnyArray, width: int) -> None:
    """Raise ValueError or TypeError unless a payload has rows of ``width`` bytes."""
    _check_array("payload", payload, 2, jnp.uint8)
    if payload.shape[1] != width:
        raise ValueError(f"payload rows have {payload.shape[1]} bytes, but this format needs {width}")


def _check_rotation(n: int, rotation: int) -> None:
    """Raise ValueError unless rows of ``n`` elements can be rotated in this width."""
    if rotation not in (0, ROTATION):
        raise ValueError(f"rotation {rotation}: choose 0 (none) or {ROTATION}")
    if rotation and n % rotation:
        raise ValueError(f"rows of {n} elements cannot be rotated in groups of {rotation}: pad the rows")


def _check_rounding(fmt: str, rounding: str, seed: AnyArray | None) -> tuple[str, jax.Array | None]:
    """The rounding, and the seed, or None if this encoder draws no random bits.

    Raises ValueError or TypeError if the rounding is unknown, or the seed is missing or no uint32 scalar.
    """
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding {rounding!r}: choose one of {', '.join(ROUNDINGS)}")
    if rounding == "nearest" or fmt not in QUANTIZED:
        return "nearest", None
    if seed is None:
        raise ValueError("stochastic rounding needs a seed: pass a uint32 scalar array")
    seed = jnp.asarray(seed)
    if seed.shape != () or seed.dtype != jnp.uint32:
        raise TypeError(f"seed is {seed.dtype}{list(seed.shape)}: expected a uint32 scalar")
    return rounding, seed
