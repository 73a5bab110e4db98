"""The calls of the tests of the Mosaic kernels."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from kernel_cases import case

from pallas_kernels import reference

FORMATS = ("int8", "int4", "fp8")
PEERS = 3
Call = tuple[str, tuple[jax.Array | None, ...], dict[str, Any]]


def call(module: ModuleType, name: str, arrays: tuple, static: dict[str, Any]) -> jax.Array:
    """The module's function `name`, of the reference or of an implementation."""
    return getattr(module, name)(*arrays, **static)


def calls_of(fmt: str, block: int, rows: int, n: int, kind: str = "normal") -> Iterator[Call]:
    """Calls of every function that has a kernel, on rows of n elements of a kind of data."""
    options = {"fmt": fmt, "block": block}
    nearest = {"rounding": "nearest", "rotation": 0}
    for dtype in (jnp.bfloat16, jnp.float32):
        x = jnp.asarray(case(kind, rows, n)).astype(dtype)
        yield "encode", (x, None), {**options, **nearest}
    leaf = jnp.asarray(case(kind, 8, n)).astype(jnp.bfloat16).reshape(-1)
    order = {"local": 2, "nodes": 2, "chunks": 2}
    yield "encode_reordered", (leaf, None), {**options, **order, **nearest}
    payload = reference.encode(jnp.asarray(case(kind, PEERS, n)), None, **options, **nearest)
    for dtype in (jnp.bfloat16, jnp.float32):
        yield "decode", (payload,), {**options, "n": n, "dtype": jnp.dtype(dtype)}
