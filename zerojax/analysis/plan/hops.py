"""The communication of a training step, from formulas.

For a leaf of n layers, of which a device owns s elements, on N nodes of L devices, with row bytes w and v of
its weights' formats over ``node`` and ``local``, and g and h of its gradients' over ``local`` and ``node``,
one device sends each time:

================== ================= ======================
hop                over              bytes
================== ================= ======================
gather_node        node              n (N-1) w(s)
gather_local       local             n (L-1) N v(s)
reduce_local       local             n (L-1) g(N s)
reduce_node        node              n (N-1) h(s)
reduce in one hop  node and local    n (N L - 1) h(s)
================== ================= ======================
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from zerojax.adapters.nnx_adapter import NNXAdapter
from zerojax.formatting import milliseconds, numeric, size
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.wire_format import Codec
from zerojax.train.spec import ParamGroup, TrainSpec


@dataclass(frozen=True)
class HopPlan:
    """One hop of one phase.

    Attributes:
        phase: one of ``zerojax.analysis.comm_report.PHASES``.
        axis: "node", "local" or "node+local".
        formats: wire formats, by decreasing number of elements.
        local_bytes: that one device sends within its node per step.
        node_bytes: that one device sends to other nodes per step.
        codec_bytes: that one device reads and writes in its own memory per step to encode and decode; 0 for
            raw formats.
        usual: False for the resync, which only some steps have; it is in no total.
        messages: to other nodes that one device sends per step, a collective for each layer; 0 within a node.
    """

    phase: str
    axis: str
    formats: tuple[str, ...]
    local_bytes: int
    node_bytes: int
    codec_bytes: int = 0
    usual: bool = True
    messages: int = 0


def hops_of(spec: TrainSpec) -> tuple[HopPlan, ...]:
    """One hop per phase and axis, in order; hops that send nothing are left out."""
    together: dict[tuple[str, str, bool], list[tuple[HopPlan, int]]] = {}
    for hop, elements in _hops(spec):
        together.setdefault((hop.phase, hop.axis, hop.usual), []).append((hop, elements))
    merged = (_sum(same) for same in together.values())
    return tuple(hop for hop in merged if hop.local_bytes or hop.node_bytes)


def _hops(spec: TrainSpec) -> Iterator[tuple[HopPlan, int]]:
    """Every hop of every leaf, with its number of elements."""
    for group in spec.groups:
        for leaf in group.leaves:
            send = _sender(leaf)
            yield from _weight_hops(spec, group, leaf, send)
            yield from _gradient_hops(spec, leaf, send)
        for leaf in group.frozen:
            yield from _frozen_hops(spec, group, leaf, _sender(leaf))


Send = Callable[..., tuple[HopPlan, int]]


def _sender(leaf: ParamLayout) -> Send:
    """A function that makes the hops of one leaf."""
    world, layers = leaf.world, leaf.layers

    def send(
        phase: str, axis: str, codec: Codec, *, times: float = 1, elements: int, usual: bool = True
    ) -> tuple[HopPlan, int]:
        row = round(layers * times) * codec.row_bytes(elements)
        to_nodes, to_local = world.nodes - 1, world.local - 1
        node = {"node": to_nodes, "local": 0, "node+local": to_nodes * world.local}[axis]
        local = {"node": 0, "local": to_local, "node+local": to_local}[axis]
        copied = 0 if codec.raw else round(layers * times) * _copied(phase, axis, leaf, codec, elements)
        messages = round(layers * times) if node else 0
        hop = HopPlan(phase, axis, (codec.fmt,), local * row, node * row, copied, usual, messages)
        return hop, leaf.count

    return send


def _copied(phase: str, axis: str, leaf: ParamLayout, codec: Codec, elements: int) -> int:
    """Bytes that the encoder and the decoder of one quantized hop read and write.

    A gather encodes this device's part and decodes all parts; a reduction does the reverse.
    """
    world, row = leaf.world, codec.row_bytes(elements)
    peers = {"node": world.nodes, "local": world.local, "node+local": world.size}[axis]
    if peers == 1:
        return 0
    if phase == "gradients":
        wide = 4 if axis == "node" else 2  # sums between the hops are fp32
        return peers * (wide * elements + row) + peers * row + 4 * elements
    narrow = leaf.weights.local.row_bytes(elements)
    return 4 * elements + row + peers * (row + narrow)


def _weight_hops(
    spec: TrainSpec, group: ParamGroup, leaf: ParamLayout, send: Send
) -> Iterator[tuple[HopPlan, int]]:
    zero, strategy = spec.zero, spec.strategy
    over_node, over_local = leaf.weights.node, leaf.weights.local
    shard, secondary = leaf.shard, leaf.secondary

    def both(phase: str, times: float, *, node: bool) -> Iterator[tuple[HopPlan, int]]:
        if node:
            yield send(phase, "node", over_node, times=times, elements=shard)
        # A secondary row is encoded shard by shard; blocks divide shards, so that the bytes are the same.
        yield send(phase, "local", over_local, times=times, elements=secondary)

    if zero.stage in (1, 2):
        yield from both("weights forward", 1, node=True)
    if zero.stage < 3:
        return
    if zero.weights_delta:
        yield send("delta", "node", over_node, elements=shard)
        if zero.delta_resync:
            yield send("resync", "node", over_local, elements=shard, usual=False)
    passes = zero.passes
    yield from both("weights forward", passes, node=strategy.source == "primary")
    if group.unit is not None:
        yield from both(
            "weights backward", passes * _gathered_again(spec, group), node=strategy.keep == "primary"
        )


def _frozen_hops(
    spec: TrainSpec, group: ParamGroup, leaf: ParamLayout, send: Send
) -> Iterator[tuple[HopPlan, int]]:
    """Frozen weights are gathered and decoded within a node, and may cross nodes before."""
    passes, codec = spec.zero.passes, leaf.weights.local

    def both(phase: str, times: float) -> Iterator[tuple[HopPlan, int]]:
        if spec.strategy.frozen == "primary":
            hop, count = send(phase, "node", codec, times=times, elements=leaf.shard)
            yield replace(hop, codec_bytes=0), count
        yield send(phase, "local", codec, times=times, elements=leaf.secondary)

    yield from both("weights forward", passes)
    if group.unit is not None:
        yield from both("weights backward", passes * _gathered_again(spec, group))


def _gathered_again(spec: TrainSpec, group: ParamGroup) -> float:
    """The fraction of a group that the backward pass gathers: a prefetching scan still has its last layer."""
    prefetched = bool(group.stack) and isinstance(spec.adapter, NNXAdapter)
    return 1 - 1 / group.layers if prefetched else 1


def _gradient_hops(spec: TrainSpec, leaf: ParamLayout, send: Send) -> Iterator[tuple[HopPlan, int]]:
    zero, strategy = spec.zero, spec.strategy
    first, second = leaf.grads.local, leaf.grads.node
    passes = 1 if strategy.sink == "full" else zero.passes
    if zero.grads_hops == 1:
        yield send("gradients", "node+local", second, times=passes, elements=leaf.shard)
    else:
        once = 1 if strategy.sink == "secondary" else passes
        yield send("gradients", "local", first, times=passes, elements=leaf.secondary)
        yield send("gradients", "node", second, times=once, elements=leaf.shard)
    if zero.stage == 0:
        yield send("gradients", "node", second, elements=leaf.shard)
        yield send("gradients", "local", second, elements=leaf.secondary)


def _sum(hops: list[tuple[HopPlan, int]]) -> HopPlan:
    """Merge the hops of one phase and axis."""
    first, formats = hops[0][0], Counter[str]()
    for hop, elements in hops:
        formats.update(dict.fromkeys(hop.formats, elements))
    return HopPlan(
        first.phase,
        first.axis,
        tuple(fmt for fmt, _ in formats.most_common()),
        sum(hop.local_bytes for hop, _ in hops),
        sum(hop.node_bytes for hop, _ in hops),
        sum(hop.codec_bytes for hop, _ in hops),
        first.usual,
        max(hop.messages for hop, _ in hops),  # the leaves of a layer travel together
    )


def hops_table(
    hops: Sequence[HopPlan],
    title: str = "Expected bytes that one device sends per step",
    seconds: Callable[[HopPlan], tuple[float, float]] | None = None,
) -> Table:
    """Bytes by phase and axis, and their time if ``seconds`` gives that of a hop on either link."""
    time = () if seconds is None else ("ms",)
    numbers = numeric("in the node", *time, "between nodes", *time)
    table = Table("phase", "over", "formats", *numbers, title=title)

    def sent(together: Sequence[HopPlan]) -> Iterator[str]:
        """The cells of some hops: bytes, and time, within the node and between nodes."""
        totals = sum(hop.local_bytes for hop in together), sum(hop.node_bytes for hop in together)
        for link, total in enumerate(totals):
            yield size(total)
            if seconds is not None:
                yield milliseconds(sum(seconds(hop)[link] for hop in together))

    for hop in hops:
        row = sent([hop])
        if not hop.usual:
            row = (f"({cell})" for cell in row)
        table.add_row(hop.phase, hop.axis, ", ".join(hop.formats), *row)
    table.add_section()
    table.add_row("total", "", "", *sent([hop for hop in hops if hop.usual]))
    if not all(hop.usual for hop in hops):
        table.caption = "(in parentheses: not in every step, and in no total)"
    return table


def usual_bytes(hops: Sequence[HopPlan]) -> tuple[int, int]:
    """Bytes that one device sends in a usual step: within its node, and to other nodes."""
    usual = [hop for hop in hops if hop.usual]
    return sum(hop.local_bytes for hop in usual), sum(hop.node_bytes for hop in usual)
