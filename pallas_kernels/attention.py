"""Attention of one new token per row to a key-value cache, checked; see ``pallas_kernels.backends``."""

import jax
import jax.numpy as jnp

from pallas_kernels import attention_reference
from pallas_kernels.backends import dispatch
from pallas_kernels.formats import AnyArray


def attend_cache(
    query: AnyArray,
    keys: AnyArray,
    values: AnyArray,
    layer: AnyArray | int,
    start: AnyArray,
    stop: AnyArray,
    sinks: AnyArray | None = None,
    *,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Attention of one query per row and head to the columns [start, stop) of a layer of the cache.

    The kernel reads each of these columns once, from its place in the cache. It keeps no scores, as in
    FlashAttention (Dao et al., 2022, algorithm 1). If there are too few rows to fill the chip, they are split
    over their columns (Flash-Decoding, Dao et al., 2023).

    Args:
        query: [rows, heads, dim], in the dtype of the cache.
        keys: [layers, rows, kv_heads, length, dim]. kv_heads divides heads, and query head h reads key head
            h // (heads / kv_heads).
        values: as ``keys``.
        layer: int32 scalar.
        start: first column of each row, int32 [rows].
        stop: the column after the last one of each row, int32 [rows]; above ``start``, at most ``length``.
        sinks: an additional score in each head's softmax, without a value, [heads]; None for none.
        scale: factor of the scores.
        softcap: scores become softcap x tanh(scores / softcap); None leaves them as they are.

    Returns:
        [rows, heads, dim], in the dtype of the cache. Kernel and specification differ by rounding.

    Raises:
        ValueError: a shape does not fit.
        TypeError: the dtypes of query, keys and values differ, or ``start`` or ``stop`` is not int32.
    """
    if query.ndim != 3 or keys.ndim != 5 or keys.shape != values.shape:
        raise ValueError(
            f"query {query.shape}, keys {keys.shape} and values {values.shape}: pass [rows, heads, dim] and "
            "twice [layers, rows, kv_heads, length, dim]"
        )
    rows, heads, dim = query.shape
    _, cached, kv_heads, _, width = keys.shape
    if (cached, width) != (rows, dim) or heads % kv_heads:
        raise ValueError(
            f"query {query.shape} and keys {keys.shape}: rows and dim must agree, and kv_heads divide heads"
        )
    if not query.dtype == keys.dtype == values.dtype:
        raise TypeError(
            f"query, keys and values are {query.dtype}, {keys.dtype} and {values.dtype}: pass one dtype"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks have shape {list(sinks.shape)}: pass [{heads}], one number for each head")
    for name, array in (("start", start), ("stop", stop)):
        if array.shape != (rows,) or array.dtype != jnp.int32:
            raise TypeError(f"{name} is {array.dtype}{list(array.shape)}: pass int32[{rows}]")
    return dispatch(
        "attend_cache",
        query,
        keys,
        values,
        jnp.asarray(layer, jnp.int32),
        start,
        stop,
        sinks,
        specification=attention_reference,
        scale=scale,
        softcap=softcap,
    )
