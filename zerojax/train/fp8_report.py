"""The precision that each weight loses in fp8, measured outside the step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from zerojax.matmul import fp8
from zerojax.sharding.mesh import NODE
from zerojax.train.fields import Shards, on_devices
from zerojax.train.pass_weights import masters_of, refreshed, with_scales
from zerojax.train.spec import with_spec, without_spec
from zerojax.train.state import TrainState, check_there
from zerojax.weights import Weight


class Fp8Loss(NamedTuple):
    """The loss of precision of one weight's fp8 codes.

    Attributes:
        saturated: fraction of elements beyond e4m3's largest value, which they become.
        underflowed: fraction of elements that are not zero and become zero.
        error: root mean square of all errors, divided by the root mean square of the weight.
    """

    saturated: Any
    underflowed: Any
    error: Any


def fp8_report(state: TrainState) -> dict[str, Fp8Loss]:
    """The precision that each weight of fp8 matmuls loses in the codes of the next step.

    With ``weights_delta`` these are the codes of the replica after it is refreshed. All processes must call
    it. It reads each weight once, and changes nothing.

    Args:
        state: any.

    Returns:
        By the weight's path, joined by "/"; for a stacked weight, of all layers together. Empty without fp8
        matmuls.

    Raises:
        ConfigurationError: the state was donated, or is abstract.
    """
    return jax.tree.map(float, jax.device_get(_dispatched(state)))


def fp8_metrics(state: TrainState) -> dict[str, Array]:
    """``fp8_report`` as metrics of a run, "fp8/PATH/error" and so on: fp32 scalars, still being computed."""
    found = _dispatched(state)
    return {f"fp8/{name}/{kind}": x for name, loss in found.items() for kind, x in loss._asdict().items()}


def _dispatched(state: TrainState) -> dict[str, Fp8Loss]:
    check_there(state)
    spec = state.spec
    return spec.once("fp8 report", lambda: jax.jit(with_spec(spec, _losses)))(without_spec(state))


def _losses(state: TrainState) -> dict[str, Fp8Loss]:
    spec = state.spec.reading
    chosen = [leaf for leaf in spec.leaves if leaf.fp8]

    def local(shards: Shards) -> dict[str, Fp8Loss]:
        masters = masters_of(spec, shards.params)
        masters, replicas = with_scales(masters, shards.replicas)
        if replicas and not shards.current_replicas:
            replicas = refreshed(spec, masters, replicas, shards.step)
        return {leaf.name: _loss(masters[leaf.path], replicas.get(leaf.path)) for leaf in chosen}

    return on_devices(spec, local, state.shards, out_specs=PartitionSpec())


def _loss(master: Weight, copy: Weight | None) -> Fp8Loss:
    """The loss of one weight, over all devices."""
    leaf, exact = master.layout, master.scaled()
    codes = fp8.encode(exact)
    if copy is not None:
        rows = copy.values.reshape(*leaf.stack, leaf.world.nodes, leaf.shard)
        codes = lax.dynamic_index_in_dim(rows, lax.axis_index(NODE), axis=-2, keepdims=False)
    sent = fp8.decode(codes, jnp.float32)
    sums = (
        jnp.abs(exact) > float(jnp.finfo(fp8.E4M3).max),
        (exact != 0) & (sent == 0),
        jnp.square(sent - exact),
        jnp.square(exact),
    )
    saturated, underflowed, error, total = lax.psum(
        jnp.stack([jnp.sum(x, dtype=jnp.float32) for x in sums]), leaf.owners
    )
    root = jnp.sqrt(error / jnp.maximum(total, jnp.finfo(jnp.float32).tiny))
    return Fp8Loss(saturated / leaf.count, underflowed / leaf.count, root)
