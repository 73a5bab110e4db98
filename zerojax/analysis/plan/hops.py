"""The communication of a training step, from formulas.

There are N nodes of L devices. A leaf has n layers, and a device owns s elements of each. A row of k elements
takes w(k) and v(k) bytes in the formats of weights over ``node`` and ``local``. It takes g(k) and h(k) bytes
in the formats of gradients over ``local`` and ``node``. One device sends each time:

================== ================= ======================
hop                over              bytes
================== ================= ======================
gather_node        node              n (N-1) w(s)
gather_local       local             n (L-1) N v(s)
reduce_local       local             n (L-1) g(N s)
reduce_node        node              n (N-1) h(s)
reduce in one hop  node and local    n (N L - 1) h(s)
sums to all nodes  node              n (N-1) t(s)
exchange_fragment  node              (N-1) (h(f) + c(f))
================== ================= ======================

Experts that are spread over a node's devices have no hops over ``local``. Their tokens do
(``Work.exchanged``), and so do the heads of devices that share rows (``Work.heads``). Both depend on the
batch.

Some matrices the optimizer needs whole. If every node holds them, their sums go to all nodes, in rows of t(k)
bytes, and they have no gather_node. If no node holds them, two all-to-alls exchange them in the compute
format.

With local updates the passes only have the hops within a node. In each step a fragment of an owner's shards
crosses nodes: f elements, in whole codec blocks. The node's change of it is sent in the gradients' format,
with the node's report. The change of the outer weights has rows of c(k) bytes. With ``outer_delay`` of 0 or 1
a separate gather sends it.

``comm_report`` counts the same bytes in the traced step, and the tests compare the two. The planner needs
formulas because it tries twenty ways of sharding. Tracing one takes 5 s for a decoder of 1.3B, a formula a
millisecond.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from rich.table import Table

from zerojax.analysis.plan.work import Work
from zerojax.formatting import milliseconds, numeric, size
from zerojax.optim.muon import by_shape, dealt_over, most_dealt
from zerojax.sharding.fragments import Fragments
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.sharding.wire_format import Codec
from zerojax.train.fields import REPORT_COLUMNS
from zerojax.train.spec import ParamGroup, TrainSpec

_REPORT_BYTES = 4 * REPORT_COLUMNS
When = Literal["forward", "backward", "passes", "alone"]
"""The part of a step in which a hop runs: one of the passes, all passes, or neither."""


@dataclass(frozen=True)
class HopPlan:
    """One hop of one phase.

    Attributes:
        phase: one of ``zerojax.analysis.comm_report.PHASES``.
        axis: "node", "local" or "node+local".
        when: the part of a step that hides it, or "alone" if nothing does.
        formats: wire formats, by decreasing number of elements.
        local_bytes: bytes that one device sends within its node per step.
        node_bytes: bytes that one device sends to other nodes per step.
        codec_bytes: bytes that one device reads and writes in its memory per step to encode and decode; 0 for
            raw formats.
        usual: False for the resync, which only some steps have. No total counts it.
        messages: collectives between nodes per step, one for each layer; 0 within a node.
    """

    phase: str
    axis: str
    when: When
    formats: tuple[str, ...]
    local_bytes: int
    node_bytes: int
    codec_bytes: int = 0
    usual: bool = True
    messages: int = 0


class ByLink[T](NamedTuple):
    """One number for a device's traffic within its node, and one for its traffic to other nodes."""

    local: T
    node: T


class LeafHop(NamedTuple):
    """One hop of one leaf: the description from which bytes, memory and time follow.

    Attributes:
        leaf: a parameter, or one kind of parameter in all layers of a stack.
        phase: as in ``HopPlan``.
        axis: as in ``HopPlan``.
        when: as in ``HopPlan``.
        codec: wire format of a row.
        elements: number of elements of the row that one device sends to each other device.
        times: how often a layer has the hop in a step.
        usual: as in ``HopPlan``.
        coded: whether the hop encodes and decodes, unless its format is raw.
        summed: whether the receiver sums the rows.
    """

    leaf: ParamLayout
    phase: str
    axis: str
    when: When
    codec: Codec
    elements: int
    times: float = 1.0
    usual: bool = True
    coded: bool = True
    summed: bool = False

    @property
    def rows(self) -> int:
        """Rows that one device sends to each other device per step."""
        return round(self.leaf.layers * self.times)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        return self.codec.row_bytes(self.elements)

    @property
    def peers(self) -> ByLink[int]:
        """The other devices that take part in the hop."""
        world = self.leaf.world
        nodes, local = (world.nodes if NODE in self.axis else 1), (world.local if LOCAL in self.axis else 1)
        return ByLink(local - 1, (nodes - 1) * local)

    @property
    def payload(self) -> int:
        """Bytes of the rows for all devices that take part, including this one."""
        return (sum(self.peers) + 1) * self.row_bytes

    def copied(self) -> int:
        """Bytes that the encoder and the decoder read and write per row.

        A gather encodes this device's part and decodes all parts. A reduction does the reverse.
        """
        devices, row = sum(self.peers) + 1, self.row_bytes
        if self.codec.raw or not self.coded or devices == 1:
            return 0
        if self.summed:
            wide = 4 if self.axis == "node" else 2  # sums between the hops are fp32
            return devices * (wide * self.elements + row) + devices * row + 4 * self.elements
        sums = self.phase in ("gradients", "gradient sums")  # arrive in fp32, weights in the local format
        decoded = 4 * self.elements if sums else self.leaf.weights.local.row_bytes(self.elements)
        return 4 * self.elements + row + devices * (row + decoded)


def hops_of(spec: TrainSpec, work: Work | None = None) -> tuple[HopPlan, ...]:
    """The hops that send anything: one for each phase and axis, in order.

    ``work`` of a micro-batch adds the hops of tokens to experts, and of heads between devices that share
    rows.
    """
    together: dict[tuple[str, str, bool], list[LeafHop]] = {}
    for hop in (*_hops_of_passes(spec.training), *_optimizer_hops(spec.training), *_exchange_hops(spec)):
        together.setdefault((hop.phase, hop.axis, hop.usual), []).append(hop)
    merged = [_sum(same) for same in together.values()]
    if work is not None:
        for phase, sent in (("tokens", work.exchanged), ("attention", work.heads)):
            formats = (spec.zero.compute_format,)
            merged.append(HopPlan(phase, LOCAL, "backward", formats, spec.zero.accumulate * sent, 0))
    return tuple(hop for hop in merged if hop.local_bytes or hop.node_bytes)


def _sum(hops: Sequence[LeafHop]) -> HopPlan:
    """Merge the hops of one phase and axis."""
    first = hops[0]
    local, node = first.peers
    formats = Counter[str]()
    for hop in hops:
        formats[hop.codec.fmt] += hop.leaf.count
    row_bytes = sum(hop.rows * hop.row_bytes for hop in hops)
    if first.phase == "fragment":
        row_bytes += _REPORT_BYTES
    return HopPlan(
        first.phase,
        first.axis,
        first.when,
        tuple(fmt for fmt, _ in formats.most_common()),
        local_bytes=local * row_bytes,
        node_bytes=node * row_bytes,
        codec_bytes=sum(hop.rows * hop.copied() for hop in hops),
        usual=first.usual,
        messages=max(hop.rows for hop in hops) if node else 0,  # the leaves of a layer travel together
    )


def _hops_of_passes(spec: TrainSpec) -> Iterator[LeafHop]:
    for group in spec.groups:
        for leaf in group.every:
            yield from _weight_hops(spec, group, leaf)
            yield from gradient_hops(spec, leaf)


def _exchange_hops(spec: TrainSpec) -> Iterator[LeafHop]:
    """The exchange of a fragment between nodes by local updates."""
    if not spec.zero.every:
        return
    for leaf in spec.leaves:
        fragments = Fragments.of(spec.zero, leaf)
        part = fragments.layout
        when: When = "passes" if spec.zero.outer_delay else "alone"
        yield LeafHop(part, "fragment", NODE, when, part.grads.node, part.shard, summed=True)
        if spec.zero.outer_delay >= 2:
            yield LeafHop(part, "fragment", NODE, when, fragments.change, part.shard)
        else:
            yield LeafHop(part, "delta", NODE, "alone", fragments.change, part.shard)


def _weight_hops(spec: TrainSpec, group: ParamGroup, leaf: ParamLayout) -> Iterator[LeafHop]:
    """The gathers of a leaf. Frozen weights travel in their stored format, and are decoded in the node."""
    zero, strategy, own = spec.zero, spec.strategy, leaf.weights
    over_node = own.local if leaf.frozen else own.node
    source, keep = (strategy.frozen,) * 2 if leaf.frozen else (strategy.source, strategy.keep)
    if leaf.in_every_node:
        source = keep = "secondary"

    def gather(when: When, times: float, *, node: bool) -> Iterator[LeafHop]:
        phase = "weights backward" if when == "backward" else "weights forward"
        if node:
            yield LeafHop(leaf, phase, NODE, when, over_node, leaf.shard, times, coded=not leaf.frozen)
        # A secondary partition is encoded shard by shard.
        if leaf.parts == 1:
            yield LeafHop(leaf, phase, LOCAL, when, own.local, leaf.shard, times * leaf.world.nodes)

    if zero.stage in (1, 2):
        yield from gather("alone", 1, node=True)
    if zero.stage < 3:
        return
    if zero.weights_delta and not leaf.frozen and not leaf.in_every_node:
        yield LeafHop(leaf, "delta", NODE, "forward" if spec.updating else "alone", over_node, leaf.shard)
        if zero.delta_resync:
            yield LeafHop(leaf, "resync", NODE, "alone", own.local, leaf.shard, usual=False)
    yield from gather("forward", zero.passes, node=source == "primary")
    if group.unit is not None:
        # A prefetching scan still has its last layer in the backward pass.
        again = 1 - 1 / group.layers if group.unit in spec.adapter.ends else 1
        yield from gather("backward", zero.passes * again, node=keep == "primary")


def gradient_hops(spec: TrainSpec, leaf: ParamLayout) -> Iterator[LeafHop]:
    """The reductions of a leaf's gradients, and at stage 0 the gathers of the sums."""
    if leaf.frozen:
        return
    zero, strategy = spec.zero, spec.strategy
    first, second = leaf.grads.local, leaf.grads.node
    within: When = "alone" if strategy.grad_level == "full" else "backward"
    between: When = "alone" if strategy.grad_level == "secondary" else within
    times, once = (1 if when == "alone" else zero.passes for when in (within, between))
    if zero.grads_hops == 1:
        yield LeafHop(leaf, "gradients", "node+local", within, second, leaf.shard, times, summed=True)
    else:
        if leaf.parts == 1:
            yield LeafHop(leaf, "gradients", LOCAL, within, first, leaf.secondary, times, summed=True)
        yield LeafHop(leaf, "gradients", NODE, between, second, leaf.shard, once, summed=True)
    if leaf.sums and strategy.sums_in_pass:
        yield LeafHop(leaf, "gradients", NODE, between, leaf.sums, leaf.shard)
    elif leaf.sums:
        yield LeafHop(leaf, "gradient sums", NODE, "alone", leaf.sums, leaf.shard)
    if zero.stage == 0:
        yield LeafHop(leaf, "gradients", NODE, "alone", second, leaf.shard)
        yield LeafHop(leaf, "gradients", LOCAL, "alone", second, leaf.secondary)


def _optimizer_hops(spec: TrainSpec) -> Iterator[LeafHop]:
    """The exchanges, there and back, of matrices that the optimizer needs whole (``zerojax.optim.muon``)."""
    if spec.zero.stage == 0:
        return
    codec = Codec(spec.zero.compute_format, spec.zero.block_size)
    for same, times in _dealt_together(spec):
        leaf, sent = same[0], most_dealt(same) * same[0].owned
        for axis in ["node+local"] if len(dealt_over(leaf)) > 1 else dealt_over(leaf):
            yield LeafHop(leaf, "optimizer", axis, "alone", codec, sent, 2 * times / leaf.layers, coded=False)


def _dealt_together(spec: TrainSpec) -> Iterator[tuple[Sequence[ParamLayout], int]]:
    """Matrices that are exchanged at once, and how often in a step: layer by layer if they are streamed."""
    if not spec.streams:
        yield from ((same, 1) for same in by_shape(spec.matrices))
        return
    matrices = {leaf.path for leaf in spec.matrices}
    for group in spec.groups:
        layer = [replace(leaf, stack=()) for leaf in group.leaves if leaf.path in matrices]
        yield from ((same, group.layers) for same in by_shape(layer))


def hops_table(
    hops: Sequence[HopPlan],
    title: str = "Expected bytes that one device sends per step",
    seconds: Callable[[HopPlan], ByLink[float]] | None = None,
) -> Table:
    """A table of bytes by phase and axis.

    ``seconds`` of a hop, within the node and between nodes, add columns of times.
    """
    time = () if seconds is None else ("ms",)
    numbers = numeric("in the node", *time, "between nodes", *time)
    table = Table("phase", "over", "formats", *numbers, title=title)

    def sent(together: Sequence[HopPlan]) -> Iterator[str]:
        """Cells for the sum of some hops: bytes (and time) within the node, then between nodes."""
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


def usual_bytes(hops: Sequence[HopPlan]) -> ByLink[int]:
    """Bytes that one device sends in a step that does not send delta's replica whole."""
    usual = [hop for hop in hops if hop.usual]
    return ByLink(sum(hop.local_bytes for hop in usual), sum(hop.node_bytes for hop in usual))
