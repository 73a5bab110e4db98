"""A result is an argument, moved or passed on, or it was computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from zerojax.dataflow import changed

W = np.arange(12.0, dtype=np.float32).reshape(3, 4)


def passed_by_a_loop(w, x):
    return lax.scan(lambda carry, _: ((carry[0], carry[0] * carry[1]), None), (w, x), None, 2)[0][0]


def exchanged_in_a_loop(w, x):
    return lax.scan(lambda carry, _: ((carry[1], carry[0]), None), (w, x), None, 2)[0][0]


def before_its_change_in_a_loop(w, x):
    """The rounds' values of a carry, of which only the first is the argument."""
    return lax.scan(lambda carry, _: (2 * carry, carry), w, None, 2)[1]


MOVED = {
    "itself": lambda w, x: w,
    "moved": lambda w, x: jnp.flip(w.T.reshape(2, 6)[None, 1:], 1),
    "layers of a scan": lambda w, x: lax.scan(lambda c, row: (c + 1, row[::-1]), x[0, 0], w)[1],
    "passed by a loop": passed_by_a_loop,
    "by both branches": lambda w, x: lax.cond(x[0, 0] > 0, lambda: w.reshape(-1), lambda: w.T.reshape(-1)),
    "behind a barrier": lambda w, x: lax.optimization_barrier((x, w))[1],
    "rematerialised": lambda w, x: jax.checkpoint(lambda w: (w, jnp.sin(w)))(w)[0],
}
CHANGED = {
    "computed": lambda w, x: w + x,
    "a constant": lambda w, x: W,
    "another": lambda w, x: x,
    "another behind a barrier": lambda w, x: lax.optimization_barrier((x, w))[0],
    "by one branch": lambda w, x: lax.cond(x[0, 0] > 0, lambda: w, lambda: x),
    "exchanged in a loop": exchanged_in_a_loop,
    "before its change in a loop": before_its_change_in_a_loop,
    "reduced": lambda w, x: lax.reduce(w, np.float32(0), lax.add, (0,)),
}


def found(function):
    return changed(jax.make_jaxpr(function)(W, W).jaxpr, ["w", "x"], ["w"])


@pytest.mark.parametrize("how", MOVED)
def test_what_is_moved_is_the_argument(how):
    assert found(MOVED[how]) == []


@pytest.mark.parametrize("how", CHANGED)
def test_what_is_computed_is_not(how):
    assert found(CHANGED[how]) == ["w"]
