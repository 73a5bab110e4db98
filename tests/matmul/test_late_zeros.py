"""Zeros and stacks that are allocated late: their numbers are those of JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from zerojax.matmul.late_zeros import scan, zeros_after


def test_late_zeros_are_zeros_whatever_they_wait_for():
    @jax.jit
    def late(x):
        return zeros_after({"x": x}, (2, 3), jnp.bfloat16)

    found = late(jnp.full(4, jnp.nan))
    assert (found.shape, found.dtype) == ((2, 3), jnp.bfloat16)
    assert not np.any(np.asarray(found, np.float32))


def test_a_scan_with_late_stacks_is_a_scan():
    xs = {"a": jnp.arange(12.0).reshape(4, 3), "b": jnp.arange(4)}

    def body(total, x):
        return total + x["a"], (x["a"] * total, {"b": x["b"] + 1, "none": None})

    found = jax.jit(lambda: scan(body, jnp.ones(3), xs))()
    expected = lax.scan(body, jnp.ones(3), xs)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
