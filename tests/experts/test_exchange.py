"""Tokens find their experts on other devices, and come back: the same as with all experts on one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax.sharding import PartitionSpec as P
from plain_experts import assert_close, plain_experts, some_experts, some_routing

import zerojax
from zerojax.comm.in_order import on_mesh
from zerojax.experts import Activation, ExpertWeights, apply_experts
from zerojax.sharding.mesh import AXES, LOCAL, NODE

TOKENS, WIDTH, HIDDEN, EXPERTS = 5, 6, 7, 8  # tokens of a device


def both(nodes: int, local: int, per_token: int, capacity: float, *, biases: bool = False):
    """Outputs and gradients on a mesh, and by the plain loop, as functions of tokens and routing."""
    mesh = zerojax.make_mesh(nodes, local)
    activation: Activation = "swiglu_clamped" if biases else "swiglu"
    own = some_experts(EXPERTS, WIDTH, HIDDEN, biases=biases)

    def on_device(x: Array, experts: Array, weights: Array, cotangent: Array, own: ExpertWeights):
        def of(x: Array, weights: Array, own: ExpertWeights) -> Array:
            return apply_experts(
                x, experts, weights, own, of=EXPERTS, activation=activation, capacity=capacity
            )

        out, pull = jax.vjp(of, x, weights, own)
        of_x, of_weights, of_own = pull(cotangent)
        return out, of_x, of_weights, jax.lax.psum(of_own, NODE)

    rows = P(AXES)
    on_devices = on_mesh(
        on_device, mesh, in_specs=(rows,) * 4 + (P(LOCAL),), out_specs=(rows,) * 3 + (P(LOCAL),)
    )

    @jax.jit
    def plain(x: Array, experts: Array, weights: Array, cotangent: Array, own: ExpertWeights):
        loop = partial(plain_experts, experts=experts, activation=activation)
        out, pull = jax.vjp(lambda x, weights, own: loop(x, weights=weights, own=own), x, weights, own)
        return out, *pull(cotangent)

    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.normal(size=(mesh.size * TOKENS, WIDTH)), jnp.float32) for _ in "xc")
    run = jax.jit(on_devices)

    def compare(*, skewed: bool) -> None:
        experts, weights = some_routing(len(x), EXPERTS, per_token, skewed=skewed)
        args = (x, experts, weights, cotangent, own)
        assert_close(run(*args), plain(*args))

    return compare


@pytest.mark.parametrize(
    ("nodes", "local", "per_token", "capacity", "biases"),
    [
        (2, 2, 3, 0.3, True),
        (1, 4, 3, 9, False),  # one round; a token has at most two experts on a device
        pytest.param(1, 2, 3, 1.25, False, marks=pytest.mark.slow),
        pytest.param(1, 4, 3, 0.3, False, marks=pytest.mark.slow),
        pytest.param(2, 1, 3, 0.3, False, marks=pytest.mark.slow),  # all are on one
        pytest.param(2, 2, 1, 0.1, False, marks=pytest.mark.slow),
        pytest.param(1, 4, 8, 1.25, True, marks=pytest.mark.slow),  # every token goes to all
    ],
)
def test_experts_over_a_node_equal_a_loop_over_all(
    nodes: int, local: int, per_token: int, capacity: float, biases: bool
):
    compare = both(nodes, local, per_token, capacity, biases=biases)
    compare(skewed=False)
    if per_token < EXPERTS:
        compare(skewed=True)


def test_parts_that_no_device_of_a_node_has_are_refused():
    x, own = jnp.ones((TOKENS, WIDTH)), some_experts(4, WIDTH, HIDDEN)
    experts, weights = some_routing(TOKENS, 8, 2)
    with pytest.raises(zerojax.ZeroError, match="weights of 4 experts of 8"):
        apply_experts(x, experts, weights, own, of=8)
    with pytest.raises(zerojax.ZeroError, match="capacity=0"):
        apply_experts(x, experts, weights, own, of=4, capacity=0)
