"""The way of tokens to experts and back.

``ZeroConfig(experts="local")`` spreads a layer's experts over the devices of a node. Every device then
gathers the node's tokens and their choice of experts, computes its own experts on them, and sends each device
the sums for its tokens. So a token is sent to a device once, however many of its experts are there. Nothing
crosses nodes.
"""

import math

import jax
from jax import lax
from jaxtyping import Array, Float, Int32

from zerojax.comm.coalesced import exchange_together, gather_together
from zerojax.errors import ConfigurationError
from zerojax.experts.mlp import Activation, ExpertWeights, Plan, mlp
from zerojax.experts.rows import rows_of
from zerojax.matmul.replay import call_reader
from zerojax.sharding.mesh import LOCAL
from zerojax.sharding.wire_format import sum_rows

CAPACITY = 1.25
"""Rows of a round on one of several devices, relative to its share under even use of the experts."""


def apply_experts(
    x: Float[Array, "tokens d"],
    experts: Int32[Array, "tokens per_token"],
    weights: Float[Array, "tokens per_token"],
    own: ExpertWeights,
    *,
    of: int,
    activation: Activation = "swiglu",
    capacity: float = CAPACITY,
) -> Float[Array, "tokens d"]:
    """The weighted sum of its experts' outputs for each token; no token is dropped.

    Args:
        x: tokens, which are cast to the experts' dtype.
        experts: each token's experts, all different.
        weights: the weights of the experts' outputs, fp32.
        own: the weights of all experts; inside a step also this device's equal part of them.
        of: the number of all experts.
        activation: the experts' activation.
        capacity: see ``zerojax.Experts`` and ``zerojax.experts.mlp``.

    Returns:
        Sums over experts, computed in fp32, in the dtype of ``x``.
    """
    count = own.up.shape[0]
    parts = _parts(count, of)
    if not capacity > 0:
        raise ConfigurationError(f"capacity={capacity} must be above 0")
    tokens, per_token = experts.shape
    if not tokens:
        return x
    wide = x.astype(own.up.dtype)
    if parts == 1:
        plan = Plan(activation, tokens * per_token, 1, True)
        added = call_reader(mlp, plan, wide, weights, own, rows_of(experts, 0, count, plan.rows))
        return added.astype(x.dtype)
    most = parts * tokens * min(per_token, count)
    rows = min(math.ceil(capacity * tokens * per_token), most)
    plan = Plan(activation, rows, -(-most // rows), False)
    padded = max(parts * tokens * per_token, plan.rows * plan.rounds)
    wide, weights, experts = _to_node(wide, weights, experts)
    first = lax.axis_index(LOCAL) * count
    added = call_reader(mlp, plan, wide, weights, own, rows_of(experts, first, count, padded))
    return _to_owners(added).astype(x.dtype)


def _parts(count: int, of: int) -> int:
    """The number of devices that share ``of`` experts, if this device has ``count`` of them."""
    if of == count:
        return 1
    try:
        devices = lax.axis_size(LOCAL)
    except NameError:
        devices = 1
    if devices == 1 or of != count * devices:
        raise ConfigurationError(
            f"weights of {count} experts of {of}: expected all of them, or inside a step an equal part on "
            f"each of the {devices} devices of a node"
        )
    return devices


def _gather(*parts: Array) -> tuple[Array, ...]:
    """Every device's ``[tokens, m]``, as ``[devices * tokens, m]``."""
    with jax.named_scope("gather_tokens"):
        arrived = gather_together([part.reshape(-1) for part in parts], LOCAL)
    return tuple(all.reshape(-1, part.shape[1]) for all, part in zip(arrived, parts, strict=True))


def _sum_at_owners(*parts: Array) -> tuple[Array, ...]:
    """Sum ``[devices * tokens, m]`` over a node's devices, in fp32 and in order, at each token's owner."""
    devices = lax.axis_size(LOCAL)
    with jax.named_scope("return_tokens"):
        arrived = exchange_together([part.reshape(devices, -1) for part in parts], LOCAL).split()
    each = zip(arrived, parts, strict=True)
    return tuple(sum_rows(x).astype(like.dtype).reshape(-1, like.shape[1]) for x, like in each)


@jax.custom_vjp
def _to_node(x: Array, weights: Array, experts: Array) -> tuple[Array, Array, Array]:
    """The tokens of all devices of a node."""
    x, weights, experts = _gather(x, weights, experts)
    return x, weights, experts


def _to_node_bwd(_: None, cotangents: tuple[Array, Array, Array]) -> tuple[Array, Array, None]:
    x, weights = _sum_at_owners(*cotangents[:2])
    return x, weights, None


_to_node.defvjp(lambda *args: (_to_node(*args), None), _to_node_bwd)


@jax.custom_vjp
def _to_owners(added: Array) -> Array:
    """Sum all devices' results for this device's tokens."""
    (out,) = _sum_at_owners(added)
    return out


_to_owners.defvjp(lambda added: (_to_owners(added), None), lambda _, cotangent: _gather(cotangent))
