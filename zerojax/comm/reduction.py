"""The hops that bring one unit's gradients from every device to their sums.

All methods of ``GradientReduction`` run inside ``shard_map`` on one device's values. The gradients of a unit
share one collective per hop (``zerojax.comm.coalesced``); payloads of a megabyte or more go alone.

1. ``encode``, ``send`` and ``sum`` are qgZ (ZeRO++ section 3.3). Gradients are encoded, exchanged over
   ``local``, decoded and summed in fp32. The sums are encoded again, exchanged over ``node``, decoded and
   summed in fp32 at the owner. A scan can run each hop in a different iteration.
2. ``reduce_node`` is the last hop alone, for gradients that cross nodes once per step.
3. ``to_all_nodes`` sends the owners' sums to all nodes, for parameters whose masters every node holds.
   They are encoded once more and all-gathered over ``node``; every node, the owner's included, decodes the
   same bytes. This is the last hop of 1 if ``ShardingStrategy.sums_in_pass``; otherwise it follows once per
   step.

Experts that are spread over a node's devices (``ParamLayout.parts``) have no hop over ``local``. Their
gradients are complete on their device, and are passed on unchanged while the other gradients cross.

In a stack, a ``GradientQueue`` sends gradients on behind the layer that computes. If gradients cross nodes,
each hop has an iteration of the backward pass to itself, and so has the sum. While layer i computes, layer i
+ 1's gradients are sent over their first hop, layer i + 2's over their second, and layer i + 3's are summed.
If every node holds the master weights, layer i + 3's sums are sent on to all nodes, and layer i + 4's are
decoded. If gradients cross no nodes, layer i + 1's are sent over all hops at once. Where sums update their
layer, hops within a node have iterations to themselves as well, so that an update never waits.

A mesh axis of extent 1 has no hop, and nothing is encoded for it. Each hop has a named scope, which profiles
show, and by which ``zerojax.analysis.comm_report`` names the collective.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

import pallas_kernels
from zerojax.comm.coalesced import Rows, exchange_together, gather_together
from zerojax.sharding.layers import Place
from zerojax.sharding.layout import ParamLayout, Values, flatten
from zerojax.sharding.mesh import LOCAL, NODE, OWNED, MeshShape
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.sharding.wire_format import Codec, Seed, mix

LOCAL_HOP, NODE_HOP, SUMS_HOP = 1, 2, 3
"""Salts for the random bits of a gradient's hops."""

Payload = tuple[Values, ...]
"""Encoded gradients: per chunk and parameter."""


@dataclass(frozen=True)
class GradientReduction:
    """How the gradients of parameters that travel together are summed.

    Attributes:
        strategy: to which level, and over which hops.
        leaves: the layouts of the trained parameters, perhaps none. ``Values`` has one array for each.
        world: extents of the mesh.
        axes: the mesh axes that a gradient crosses, in order; axes of extent 1 are left out.
        sends_sums: whether one more hop sends sums from their owners to all nodes.
        hops: the number of hops to ``grad_level``.
        crosses_nodes: whether gradients cross the nodes on their way to ``grad_level``.
        joins_hops: whether the last two hops of different layers are to be sent by ``send_both``.
        last_scope: the name scope of the hop over the last of ``axes``.
    """

    strategy: ShardingStrategy
    leaves: tuple[ParamLayout, ...]
    world: MeshShape
    axes: tuple[str | tuple[str, str], ...] = field(init=False, compare=False)
    sends_sums: bool = field(init=False, compare=False)
    hops: int = field(init=False, compare=False)
    crosses_nodes: bool = field(init=False, compare=False)
    joins_hops: bool = field(init=False, compare=False)
    last_scope: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        strategy, world = self.strategy, self.world
        to_owner = strategy.summed_at == "primary"
        if to_owner and strategy.hops == 1:
            axes = (OWNED,) if world.size > 1 else ()
        else:
            extents = {LOCAL: world.local} | ({NODE: world.nodes} if to_owner else {})
            axes = tuple(axis for axis, extent in extents.items() if extent > 1)
        sends_sums = strategy.sums_in_pass and any(leaf.in_every_node for leaf in self.leaves)
        vars(self).update(
            axes=axes,
            sends_sums=sends_sums,
            hops=len(axes) + sends_sums,
            crosses_nodes=strategy.grad_level == "primary" and world.nodes > 1,
            joins_hops=sends_sums and strategy.separate_stream,
            last_scope="reduce_local" if axes[-1:] == (LOCAL,) else "reduce_node",
        )

    @staticmethod
    def of(strategy: ShardingStrategy, layouts: Sequence[ParamLayout]) -> "GradientReduction":
        """How the gradients of a unit are summed, from the layouts of all its weights."""
        leaves = tuple(leaf for leaf in layouts if not leaf.frozen)
        return GradientReduction(strategy, leaves, layouts[0].world)

    @jax.named_scope("encode_gradients")
    def encode(self, grads: Values, seed: Seed) -> Payload:
        """Encode gradients for their first hop.

        ``grads`` are this device's cotangents of one layer's whole weights.

        Returns:
            The payloads ``[peers, m]``; row i is for peer i of the first axis. Without hops, one chunk of one
            row that is not encoded.
        """
        axes = self.axes
        chunks = self.strategy.chunks
        if not axes:
            return (tuple(_as_row(grad, leaf) for grad, leaf in self._each(grads)),)
        if len(axes) == 2:
            staged = [encode_reordered(grad, leaf, seed, chunks) for grad, leaf in self._each(grads)]
            return tuple(tuple(payload[chunk] for payload in staged) for chunk in range(chunks))
        hop = LOCAL_HOP if axes[0] == LOCAL else NODE_HOP
        peers = lax.axis_size(axes[0])
        encoded = (
            encode_rows(flatten(grad, leaf).reshape(peers, -1), leaf, self._last_codec(leaf), seed, hop)
            if self._crosses(leaf, axes[0])
            else _as_row(grad, leaf)
            for grad, leaf in self._each(grads)
        )
        return (tuple(encoded),)

    def send(self, chunks: Payload, seed: Seed, hop: int) -> Payload:
        """Send encoded gradients over one hop, and encode them for the next one if there is one.

        One fused pass between two hops decodes, sums and encodes again. Chunks do not depend on each other:
        if both hops of a unit follow each other, one chunk's node hop overlaps the next chunk's local hop
        (qgZ's pipeline, ZeRO++ Figure 8).

        Args:
            chunks: the result of ``encode``, or of this method for the hop before.
            seed: the same as in ``encode``.
            hop: which of the ``hops``, from 0.

        Returns:
            The payload of the next hop; after the last hop, the arrived payload, which is not yet decoded.
        """
        axes = self.axes
        if hop == len(axes):
            separate_stream = self.strategy.separate_stream
            with jax.named_scope(self.last_scope):
                return tuple(self._gather_sums(chunk, separate_stream=separate_stream) for chunk in chunks)
        if hop == len(axes) - 1:
            with jax.named_scope(self.last_scope):
                arrived = tuple(self._exchanged(chunk, axes[hop]) for chunk in chunks)
            return self._at_owners(arrived, seed)
        sent: list[Values] = []
        with jax.named_scope("reduce_local"):
            for index, chunk in enumerate(chunks):
                arrived = self._exchanged(chunk, LOCAL)
                salted = mix(seed, index)  # bits follow from the place in a chunk: other ones for each
                summed = (
                    sum_and_encode(rows, leaf, salted, len(chunks)) for rows, leaf in self._each(arrived)
                )
                sent.append(tuple(summed))
        return tuple(sent)

    def send_both(self, payload: Payload, sums: Payload, seed: Seed) -> tuple[Payload, Payload]:
        """Send two layers' gradients over the last two hops in one collective.

        XLA runs only one collective at a time on the stream of the hops between nodes. The sums, which a node
        sends to all others, are repeated in each peer's row. That is as many bytes as an all-gather sends.

        Args:
            payload: for the hop to the owners, as ``send`` takes it.
            sums: for the last hop, from another layer.
            seed: of ``payload``.

        Returns:
            The results of ``send`` for each of the two.
        """
        (chunk,), (encoded,) = payload, sums
        with jax.named_scope(self.last_scope):
            for_all = [x for x, leaf in self._each(encoded) if leaf.sums]
            rows = [jnp.broadcast_to(x, (self.world.nodes, x.size)) for x in for_all]
            arrived = exchange_together([*chunk, *rows], NODE, separate_stream=True).split()
        gathered = iter(arrived[len(chunk) :])
        every = tuple(next(gathered) if leaf.sums else x for x, leaf in self._each(encoded))
        return self._at_owners((tuple(arrived[: len(chunk)]),), seed), (every,)

    def _at_owners(self, arrived: Payload, seed: Seed) -> Payload:
        """The payloads that have arrived at the owners; if the sums go on to all nodes, the encoded sums."""
        if not self.sends_sums:
            return arrived
        return tuple(
            self._encode_sums(self._totals(chunk, len(arrived)), mix(seed, index))
            for index, chunk in enumerate(arrived)
        )

    def sum(self, arrived: Payload) -> Values:
        """Decode and sum the payload of the last hop, or the one of ``encode`` if there are no hops.

        Returns:
            The fp32 sum, not a mean: over all devices at its owner, or over the node as a secondary
            partition.
        """
        if not self.axes:
            return tuple(rows.reshape(-1).astype(jnp.float32) for rows in arrived[0])
        of_chunk = self._decode_sums if self.sends_sums else self._totals
        pieces = [of_chunk(chunk, len(arrived)) for chunk in arrived]
        if len(pieces) == 1:
            return tuple(x.reshape(-1) for x in pieces[0])
        return tuple(jnp.concatenate(parts, axis=-1).reshape(-1) for parts in zip(*pieces, strict=True))

    @property
    def sum_dtypes(self) -> tuple[jnp.dtype, ...]:
        """The narrowest dtype that holds each sum exactly: the gradient's, if one device has all of it."""
        dtypes: list[jnp.dtype] = []
        for leaf in self.leaves:
            summed = any(self._crosses(leaf, axis) for axis in self.axes)
            kept = jnp.dtype(jnp.float32), *([] if summed else [leaf.gathered_dtype])
            dtypes.append(min(kept, key=lambda dtype: dtype.itemsize))
        return tuple(dtypes)

    def _totals(self, chunk: Values, chunks: int) -> Values:
        """The sums of a chunk's payloads after the last of the ``axes``."""
        to_owner, totals = self.strategy.summed_at == "primary", list[Array]()
        with jax.named_scope(self.last_scope):
            for rows, leaf in self._each(chunk):
                if not self._crosses(leaf, self.axes[-1]):
                    totals.append(rows.reshape(-1).astype(jnp.float32))
                    continue
                size = (leaf.shard if to_owner else leaf.secondary) // chunks
                codec = self._last_codec(leaf)
                totals.append(codec.decode_sum(rows, size, rotation=leaf.rotation))
        return tuple(totals)

    def reduce(self, grads: Values, seed: Seed) -> Values:
        """Encode gradients, send them over all hops, and sum them."""
        payload = self.encode(grads, seed)
        for hop in range(self.hops):
            payload = self.send(payload, seed, hop)
        return self.sum(payload)

    @jax.named_scope("reduce_node")
    def reduce_node(
        self, sums: Values, seed: Seed, residuals: Values | None = None
    ) -> tuple[Values, Values | None]:
        """Sum node-local sums over ``node``: from secondary partitions to the owners.

        Args:
            sums: ``[secondary]``, the fp32 sum over the node's devices, un-rotated.
            seed: salts stochastic rounding.
            residuals: with error feedback, the error of the last encoding (fp32, un-rotated), which is added
                before encoding.

        Returns:
            ``[shard]``, the fp32 sum over all devices at its owner; and the new residuals, or None.
        """
        if self.world.nodes == 1:
            return sums, None
        sent, kept = self.encode_for_owners(sums, seed, residuals)
        return self.sum_at_owners(exchange_together(sent, NODE).split()), kept

    def encode_for_owners(
        self, sums: Values, seed: Seed, residuals: Values | None = None
    ) -> tuple[Values, Values | None]:
        """The first part of ``reduce_node``: a row for each owner, and the new residuals, or None."""
        if residuals is not None:
            sums = tuple(x + residual for x, residual in zip(sums, residuals, strict=True))
        sent = tuple(
            encode_rows(x.reshape(self.world.nodes, -1), leaf, leaf.grads.node, seed, NODE_HOP)
            for x, leaf in self._each(sums)
        )
        if residuals is None:
            return sent, None
        each = zip(sums, sent, self.leaves, strict=True)
        # What the encoding loses, un-rotated.
        return sent, tuple(
            x - decoded_rows(rows, leaf, leaf.grads.node, leaf.shard).reshape(-1) for x, rows, leaf in each
        )

    def sum_at_owners(self, arrived: Sequence[Rows]) -> Values:
        """The last part of ``reduce_node``: the sums of the arrived rows."""
        return tuple(
            leaf.grads.node.decode_sum(rows, leaf.shard, rotation=leaf.rotation)
            for rows, leaf in self._each(arrived)
        )

    @jax.named_scope("sums_to_nodes")
    def to_all_nodes(
        self, sums: Values, seed: Seed, residuals: Values | None = None
    ) -> tuple[Values, Values | None]:
        """Send the owners' sums to all nodes, for parameters whose master weights every node holds.

        Args:
            sums: ``[shard]``, the fp32 sum over all devices at its owner.
            seed: salts stochastic rounding.
            residuals: with error feedback, the residuals from ``reduce_node``. The owner adds the error of
                encoding the sum to its part.

        Returns:
            ``[secondary]``, the same bits in every node, for these parameters; the other sums unchanged; and
            the residuals, or None.
        """
        sent = self._encode_sums(sums, seed)
        kept = residuals
        if residuals is not None:
            each = zip(residuals, sums, sent, self.leaves, strict=True)
            kept = tuple(with_encoding_error(*of_one) for of_one in each)
        every = self._decode_sums(self._gather_sums(sent), 1)
        return tuple(x.reshape(-1) for x in every), kept

    def _encode_sums(self, sums: Values, seed: Seed) -> Values:
        """Encode the owners' sums that all nodes need, one row each; the others are returned unchanged."""
        return tuple(
            encode_rows(x[None], leaf, leaf.sums, seed, SUMS_HOP) if leaf.sums else x
            for x, leaf in self._each(sums)
        )

    def _gather_sums(self, sent: Values, *, separate_stream: bool = False) -> Values:
        """All-gather the payloads of ``_encode_sums``: one row from each node."""
        rows = [x.reshape(-1) for x, leaf in self._each(sent) if leaf.sums]
        arrived = iter(gather_together(rows, NODE, separate_stream=separate_stream))
        return tuple(next(arrived) if leaf.sums else x for x, leaf in self._each(sent))

    def _decode_sums(self, arrived: Values, chunks: int) -> Values:
        """A chunk's sums in every node, ``[nodes, shard / chunks]``; the others are returned unchanged."""
        return tuple(
            decoded_rows(x, leaf, leaf.sums, leaf.shard // chunks) if leaf.sums else x
            for x, leaf in self._each(arrived)
        )

    @jax.named_scope("all_gather_sum")
    def all_gather_sum(self, sums: Values) -> Values:
        """Replicate the owners' sums, flat and padded: the second half of stage 0's all-reduce.

        The sums stay in the wire's raw format, which saves memory; the optimizer widens them as it reads.
        """
        rows = [x.astype(leaf.grads.node.dtype) for x, leaf in self._each(sums)]
        # In the order of the blocks, l * nodes + n: nothing is transposed.
        for axis in (NODE, LOCAL):
            rows = [x.reshape(-1) for x in gather_together([x.reshape(-1) for x in rows], axis)]
        return tuple(rows)

    def _each(self, values: Sequence[Array]) -> "zip[tuple[Array, ParamLayout]]":
        """Pairs of an array in ``values`` and its layout."""
        return zip(values, self.leaves, strict=True)

    def _crosses(self, leaf: ParamLayout, axis: str | tuple[str, ...]) -> bool:
        """Whether a parameter's gradient has a hop over an axis.

        Gradients of a device's own experts stay in place.
        """
        return leaf.parts == 1 or axis != LOCAL

    def _exchanged(self, chunk: Values, axis: str | tuple[str, ...]) -> Values:
        """All-to-all over an axis; arrays that do not cross it are returned unchanged."""
        sent = [rows for rows, leaf in self._each(chunk) if self._crosses(leaf, axis)]
        separate_stream = self.strategy.separate_stream
        arrived = iter(exchange_together(sent, axis, separate_stream=separate_stream).split())
        return tuple(next(arrived) if self._crosses(leaf, axis) else rows for rows, leaf in self._each(chunk))

    def _last_codec(self, leaf: ParamLayout) -> Codec:
        return leaf.grads.local if self.axes[-1] == LOCAL else leaf.grads.node


def encode_rows(rows: Float[Array, "peers n"], leaf: ParamLayout, codec: Codec, seed: Seed, hop: int) -> Rows:
    """Encode row i of a gradient for peer i of a hop (``LOCAL_HOP`` or ``NODE_HOP``) by ``codec``."""
    return codec.encode(rows, seed=_salt(seed, leaf, codec, hop), rotation=leaf.rotation)


def _as_row(grad: Num[Array, "..."], leaf: ParamLayout) -> Rows:
    """A gradient without hops, as one row that is not encoded."""
    return flatten(grad, leaf.on_device)[None]


def encode_reordered(
    grad: Num[Array, "..."], leaf: ParamLayout, seed: Seed, chunks: int
) -> Num[Array, "chunks local m"]:
    """The payload of the first of two hops, by chunk. The encoder's index map does the reordering.

    A device's own experts skip that hop: their payload is one row that is not encoded.
    """
    world = leaf.world
    codec = leaf.grads.local
    if leaf.parts > 1:
        own = flatten(grad, leaf.on_device).reshape(world.nodes, chunks, leaf.shard // chunks)
        return own.swapaxes(0, 1).reshape(chunks, 1, -1)
    flat = flatten(grad, leaf)
    if codec.raw:
        # Device (n, l) owns block l * nodes + n. Row l of a chunk has a piece of the blocks of all (., l).
        staged = flat.reshape(world.local, world.nodes, chunks, leaf.shard // chunks)
        staged = staged.transpose(2, 0, 1, 3).reshape(chunks, world.local, -1)
        return staged.astype(codec.dtype)
    return pallas_kernels.encode_reordered(
        flat,
        codec.fmt,
        local=world.local,
        nodes=world.nodes,
        chunks=chunks,
        block=codec.block,
        rounding=codec.rounding,
        rotation=leaf.rotation,
        seed=_salt(seed, leaf, codec, LOCAL_HOP),
    )


def sum_and_encode(rows: Rows, leaf: ParamLayout, seed: Seed, chunks: int) -> Rows:
    """Between two hops: sum a chunk over the node's devices, and encode it for its owners.

    A device's own experts need no sum.
    """
    second, nodes, n = leaf.grads.node, leaf.world.nodes, leaf.shard // chunks
    if leaf.parts > 1:
        return encode_rows(rows.reshape(nodes, n), leaf, second, seed, NODE_HOP)
    salted = _salt(seed, leaf, second, NODE_HOP)
    return leaf.grads.local.decode_sum_encode(rows, second, nodes, n, seed=salted, rotation=leaf.rotation)


def with_encoding_error(
    residual: Float[Array, " secondary"], total: Float[Array, " shard"], sent: Rows, leaf: ParamLayout
) -> Float[Array, " secondary"]:
    """The residual, with the error of encoding the owner's sum added to the owner's part."""
    if leaf.sums is None:
        return residual
    lost = total - decoded_rows(sent, leaf, leaf.sums, leaf.shard).reshape(-1)
    rows = residual.reshape(leaf.world.nodes, -1)
    return rows.at[lax.axis_index(NODE)].add(lost).reshape(-1)


def decoded_rows(rows: Rows, leaf: ParamLayout, codec: Codec, n: int) -> Float[Array, "rows {n}"]:
    """Each row as its receiver decodes it (a sum over one peer), fp32, rotated back."""
    return jnp.stack([codec.decode_sum(row[None], n, rotation=leaf.rotation) for row in rows])


def _salt(seed: Seed, leaf: ParamLayout, codec: Codec, hop: int) -> Seed:
    """A seed for each parameter, hop and device; the given one if the codec draws no random bits."""
    if codec.raw or codec.rounding == "nearest":
        return seed
    return mix(seed, leaf.index, hop, lax.axis_index(NODE), lax.axis_index(LOCAL))


InFlight = tuple[Payload | None, ...]
"""The gradients of successive layers: the payload that each hop sends next, and the one that has arrived."""


class ArrivedLayer(NamedTuple):
    """One layer's gradients, which have crossed every hop and are yet to be summed."""

    payload: Payload
    place: Place


@dataclass(frozen=True)
class GradientQueue:
    """The stages of one stack; callers hold the gradients in flight.

    Attributes:
        reductions: of one layer of each kind.
        seeds: for each kind, one per layer.
        last: the last layer, whose gradients come first.
        updates: whether sums update their layers.
        primes: whether ``prime`` adds zeros. If not, each layer's gradients arrive once.
        stages: the number of hops that are stages: all of them, or none if gradients do not cross nodes.
    """

    reductions: tuple[GradientReduction, ...]
    seeds: tuple[Seed, ...]
    last: Place
    updates: bool = False
    primes: bool = field(init=False)
    stages: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute the other fields."""
        staged = self.updates or self.reductions[0].crosses_nodes
        vars(self).update(
            primes=len(self.reductions) == 1 and not self.updates,
            stages=max(each.hops for each in self.reductions) if staged else 0,
        )

    def enqueue(self, grads: Values, place: Place, behind: InFlight | None = None) -> InFlight:
        """Encode a layer's whole gradients and put them before the ones that ``advance`` returned."""
        encoded = self.reductions[place.kind].encode(grads, self._seed(place))
        return (encoded, *((None,) * self.stages if behind is None else behind))

    def advance(self, in_flight: InFlight, first: Place) -> tuple[InFlight, ArrivedLayer | None]:
        """Move every layer's gradients one stage on.

        The gradients in flight belong to layer ``first`` and the layers after it.

        Returns:
            The gradients in flight without a first stage, for ``enqueue``; and the ones that had arrived, if
            any.
        """
        *waiting, payload = in_flight
        arrived = None
        if payload is not None:
            # The zeros of `prime` belong to no layer: they go where the last layer's sums replace them.
            place = first.ahead(self.stages) if self.primes else first + self.stages
            if not self.stages:
                for hop in range(self.reductions[place.kind].hops):
                    payload = self._send(payload, place, hop)
            arrived = ArrivedLayer(payload, place)
        both: tuple[Payload, ...] = ()
        if all(reduction.joins_hops for reduction in self.reductions):
            *others, payload, sums = waiting
            place = first + len(others)
            if payload is not None and sums is not None and place.kind == (place + 1).kind:
                waiting = others
                both = self.reductions[place.kind].send_both(payload, sums, self._seed(place))
        sent = [
            None if payload is None else self._send(payload, first + hop, hop)
            for hop, payload in enumerate(waiting)
        ]
        sent += both
        if any(reduction.sends_sums for reduction in self.reductions):
            # Off the loop XLA would join the gathers of several layers, and the first wait for the last.
            sent = lax.optimization_barrier(sent)
        return tuple(sent), arrived

    def prime(self, in_flight: InFlight) -> InFlight:
        """Fill the last stage with zeros if it is empty: a loop's carry has one structure throughout."""
        if not self.primes or in_flight[-1] is not None:
            return in_flight
        last_hop = self.stages - 1
        arrival = jax.eval_shape(lambda payload: self._send(payload, self.last, last_hop), in_flight[-2])
        return (*in_flight[:-1], jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), arrival))

    def sum(self, arrived: ArrivedLayer) -> Values:
        """The sums of gradients that have arrived, at ``grad_level``."""
        return self.reductions[arrived.place.kind].sum(arrived.payload)

    def drain(self, in_flight: InFlight) -> Iterator[ArrivedLayer]:
        """The gradients still in flight, as they arrive. Layer 0's are on the first stage, and come last."""
        first = Place(self.last.order, 0)
        for done in range(self.stages + 1):
            sent, arrived = self.advance(in_flight, first + -done)
            if arrived is not None:
                yield arrived
            in_flight = (None, *sent)

    def _send(self, payload: Payload, place: Place, hop: int) -> Payload:
        reduction = self.reductions[place.kind]
        # Layers of another kind may have one more hop.
        return reduction.send(payload, self._seed(place), hop) if hop < reduction.hops else payload

    def _seed(self, place: Place) -> Seed:
        return self.seeds[place.kind][place.index]
