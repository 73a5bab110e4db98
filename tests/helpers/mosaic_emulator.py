"""Runs the bodies of Mosaic kernels on numpy arrays, one program after the other, ignoring layouts.

Pallas' own interpreter for Mosaic GPU does not support reshaped references, which the kernels need.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


class Reference:
    """A view of global memory."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype

    @property
    def at(self) -> "_At":
        return _At(self.array)

    def reshape(self, *shape: int) -> "Reference":
        return Reference(self.array.reshape(shape, copy=False))

    def store(self, value: jax.Array, **_: Any) -> None:
        assert (value.shape, value.dtype) == (self.shape, self.dtype)
        self.array[...] = np.asarray(value)


class _At:
    def __init__(self, array: np.ndarray):
        self.array = array

    def __getitem__(self, index: Any) -> Reference:
        parts = index if isinstance(index, tuple) else (index,)
        return Reference(self.array[tuple(map(_numpy_index, parts, self.array.shape))])


def _numpy_index(index: Any, size: int) -> Any:
    if isinstance(index, pl.Slice):
        first, last = int(index.start), int(index.start) + int(index.size)
        assert 0 <= first <= last <= size
        return slice(first, last)
    assert 0 <= int(index) < size
    return int(index)


def _kernel(body: Callable, *, out_type: jax.ShapeDtypeStruct, grid: tuple[int], **_: Any) -> Callable:
    def call(*arrays: jax.Array) -> jax.Array:
        out = np.full(out_type.shape, 3, out_type.dtype)
        references = [Reference(np.asarray(array)) for array in arrays]
        for program in range(grid[0]):
            lax.axis_index = lambda axis_name, program=program: jnp.int32(program)
            body(*references, Reference(out))
        return jnp.asarray(out)

    return call


def emulate(monkeypatch) -> None:
    """Replace what the kernels use of Mosaic for the rest of a test."""
    monkeypatch.setattr(lax, "axis_index", lax.axis_index)
    monkeypatch.setattr(plgpu, "kernel", _kernel)
    monkeypatch.setattr(plgpu, "load", lambda ref, **_: jnp.asarray(ref.array))
    monkeypatch.setattr(plgpu, "store", Reference.store, raising=False)  # new in JAX 0.12
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, _: x)
    monkeypatch.setattr(
        plgpu,
        "broadcasted_iota",
        lambda dtype, shape, dimension, **_: lax.broadcasted_iota(dtype, shape, dimension),
    )
