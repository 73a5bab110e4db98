"""The hops of one unit's weights, from the level where each is to a higher one.

All functions run inside ``shard_map`` on one device's values of one layer. The weights of a unit share one
collective per hop (``zerojax.comm.coalesced``), except that payloads of a megabyte or more go alone.

1. The node hop, for those at "primary", unless every node holds the master weight: the owner encodes its
   shard; an all-gather over ``node`` gives every node the secondary partition (qwZ, ZeRO++ section 3.1). With
   delta, the owner encodes its difference from the copy that every node has; every node, its own included,
   adds the same decoded difference. So copies stay bit-identical, and rounding errors are part of the next
   difference (SDP4Bit, section 3.1). A prefetching scan has ``encode``, ``cross_nodes`` and ``decode`` in
   different iterations, so the next hop between nodes waits for no encoding or decoding.
2. The local hop: an all-gather over ``local`` gives every device the whole weight, in the buffer that the
   matmuls read. The backward pass repeats this hop alone (hpZ, section 3.2), or both. Experts that are
   spread over a node's devices (``ParamLayout.parts``) have no such hop.

A mesh axis of extent 1 has no hop. Each hop has a named scope, which profiles show, and from which
``zerojax.analysis.comm_report`` learns the purpose of a collective.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from zerojax.comm.coalesced import gather_together
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.weights.weight import Payload, Weight, Weights

Payloads = tuple[Payload, ...]
"""Encoded: one for each weight that takes a hop, or delta's copy of each."""


def crosses_nodes(weights: Sequence[Weight]) -> bool:
    """Whether a gather of the weights has a hop between nodes."""
    return any(w.crosses_nodes for w in weights)


def encode(weights: Weights, copies: Payloads | None = None) -> Payloads:
    """Encode the weights at "primary" for the node hop.

    With delta's copies of those, differences from them are sent.

    Returns:
        Their payloads; on one node, which has no node hop, in the local format.
    """
    owned = _owned(weights)
    with jax.named_scope(_node_scope(delta=copies is not None)):
        return tuple(map(Weight.sent, owned, copies or (None,) * len(owned)))


def cross_nodes(payloads: Payloads, *, delta: bool, own_stream: bool = False) -> Payloads:
    """All-gather encoded weights over ``node``; the nodes' shards follow each other, not yet decoded."""
    with jax.named_scope(_node_scope(delta=delta)):
        return tuple(rows.reshape(-1) for rows in gather_together(payloads, NODE, own_stream=own_stream))


def decode(weights: Weights, arrived: Payloads, copies: Payloads | None = None) -> Weights:
    """The weights, of which those at "primary" become the secondary partitions that have arrived."""
    sent, before = iter(arrived), iter(copies or ())

    def in_node(w: Weight) -> Weight:
        if w.level != "primary":
            return w
        payload = w.sent() if w.layout.in_every_node else next(sent)
        if not w.crosses_nodes:
            return w.replace(payload, "secondary")
        return w.arrived(payload) if copies is None else w.arrived_difference(payload, next(before))

    with jax.named_scope(_node_scope(delta=copies is not None)):
        return tuple(map(in_node, weights))


def to_secondary(weights: Weights, copies: Payloads | None = None) -> Weights:
    """Bring the weights at "primary" to secondary partitions; those at higher levels stay as they are."""
    payloads = encode(weights, copies)
    if crosses_nodes(weights):
        payloads = cross_nodes(payloads, delta=copies is not None)
    return decode(weights, payloads, copies)


@jax.named_scope("gather_exact")
def gather_exact(weights: Weights) -> Payloads:
    """Secondary partitions of weights at "primary", sent in the local format: new copies for delta."""
    sent = [w.encoded(w.layout.weights.local) for w in weights]
    return (
        tuple(x.reshape(-1) for x in gather_together(sent, NODE)) if crosses_nodes(weights) else tuple(sent)
    )


def to_full(weights: Weights, dtype: Callable[[ParamLayout], jnp.dtype]) -> Weights:
    """Bring weights from secondary partitions to whole ones; those that are whole stay as they are."""
    spread = [w for w in weights if w.level != "full"]
    if not spread:
        return weights
    with jax.named_scope("gather_local"):
        arrived = iter(gather_together([to_device(w.values) for w in spread if w.crosses_local], LOCAL))
        blocks = (next(arrived) if w.crosses_local else to_device(w.values) for w in spread)
        whole = (w.whole(own, dtype(w.layout)) for w, own in zip(spread, blocks, strict=True))
        return tuple(w if w.level == "full" else next(whole) for w in weights)


def _owned(weights: Weights) -> Weights:
    """Those that their owners alone have."""
    return tuple(w for w in weights if w.level == "primary" and not w.layout.in_every_node)


def _node_scope(*, delta: bool) -> str:
    return "gather_delta" if delta else "gather_node"
