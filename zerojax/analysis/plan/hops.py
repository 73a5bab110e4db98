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
from dataclasses import dataclass
from typing import NamedTuple

from rich.table import Table

from zerojax.adapters.nnx_adapter import NNXAdapter
from zerojax.analysis.plan.work import Work
from zerojax.formatting import milliseconds, numeric, size
from zerojax.optim.muon import by_shape, dealt_over, most_dealt
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import LOCAL, NODE, MeshShape
from zerojax.sharding.wire_format import Codec
from zerojax.train.local_state import REPORT_COLUMNS, Fragments
from zerojax.train.spec import ParamGroup, TrainSpec

_REPORT_BYTES = 4 * REPORT_COLUMNS


@dataclass(frozen=True)
class HopPlan:
    """One hop of one phase.

    Attributes:
        phase: one of ``zerojax.analysis.comm_report.PHASES``.
        axis: "node", "local" or "node+local".
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
    formats: tuple[str, ...]
    local_bytes: int
    node_bytes: int
    codec_bytes: int = 0
    usual: bool = True
    messages: int = 0


class _LeafHop(NamedTuple):
    """One hop of one leaf.

    Attributes:
        leaf: a parameter, or one kind of parameter in all layers of a stack.
        phase: as in ``HopPlan``.
        axis: as in ``HopPlan``.
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

    def copied(self) -> int:
        """Bytes that the encoder and the decoder read and write per row.

        A gather encodes this device's part and decodes all parts; a reduction does the reverse.
        """
        peers = _others(self.axis, self.leaf.world)[2]
        if self.codec.raw or not self.coded or peers == 1:
            return 0
        row = self.codec.row_bytes(self.elements)
        if self.summed:
            wide = 4 if self.axis == "node" else 2  # sums between the hops are fp32
            return peers * (wide * self.elements + row) + peers * row + 4 * self.elements
        sums = self.phase in ("gradients", "gradient sums")  # arrive in fp32, weights in the local format
        decoded = 4 * self.elements if sums else self.leaf.weights.local.row_bytes(self.elements)
        return 4 * self.elements + row + peers * (row + decoded)


def _others(axis: str, world: MeshShape) -> tuple[int, int, int]:
    """Peers of a device in its node, its peers in other nodes, and the size of the group with itself."""
    nodes, local = (n if name in axis else 1 for name, n in ((NODE, world.nodes), (LOCAL, world.local)))
    return local - 1, (nodes - 1) * local, nodes * local


def hops_of(spec: TrainSpec, work: Work | None = None) -> tuple[HopPlan, ...]:
    """The hops that send anything: one for each phase and axis, in order.

    ``work`` of a micro-batch adds the hops of tokens to experts, and of heads between devices that share
    rows.
    """
    together: dict[tuple[str, str, bool], list[_LeafHop]] = {}
    for hop in (*_hops_of_passes(spec.training), *_optimizer_hops(spec.training), *_exchange_hops(spec)):
        together.setdefault((hop.phase, hop.axis, hop.usual), []).append(hop)
    merged = [_sum(same) for same in together.values()]
    if work is not None:
        bytes_sent = spec.zero.accumulate * work.exchanged
        merged.append(HopPlan("tokens", LOCAL, (spec.zero.compute_format,), bytes_sent, 0))
        heads = spec.zero.accumulate * work.heads
        merged.append(HopPlan("attention", LOCAL, (spec.zero.compute_format,), heads, 0))
    return tuple(hop for hop in merged if hop.local_bytes or hop.node_bytes)


def _sum(hops: Sequence[_LeafHop]) -> HopPlan:
    """Merge the hops of one phase and axis."""
    phase, axis, usual = hops[0].phase, hops[0].axis, hops[0].usual
    local, node, _ = _others(axis, hops[0].leaf.world)
    formats = Counter[str]()
    for hop in hops:
        formats[hop.codec.fmt] += hop.leaf.count
    row_bytes = sum(hop.rows * hop.codec.row_bytes(hop.elements) for hop in hops)
    if phase == "fragment":
        row_bytes += _REPORT_BYTES
    return HopPlan(
        phase,
        axis,
        tuple(fmt for fmt, _ in formats.most_common()),
        local_bytes=local * row_bytes,
        node_bytes=node * row_bytes,
        codec_bytes=sum(hop.rows * hop.copied() for hop in hops),
        usual=usual,
        messages=max(hop.rows for hop in hops) if node else 0,  # the leaves of a layer travel together
    )


def _hops_of_passes(spec: TrainSpec) -> Iterator[_LeafHop]:
    for group in spec.groups:
        for leaf in group.every:
            yield from _weight_hops(spec, group, leaf)
            yield from _gradient_hops(spec, leaf)


def _exchange_hops(spec: TrainSpec) -> Iterator[_LeafHop]:
    """The exchange of a fragment between nodes by local updates."""
    if not spec.zero.every:
        return
    for leaf in spec.leaves:
        fragments = Fragments.of(spec, leaf)
        part = fragments.layout
        yield _LeafHop(part, "fragment", NODE, part.grads.node, part.shard, summed=True)
        change = "fragment" if spec.zero.outer_delay >= 2 else "delta"
        yield _LeafHop(part, change, NODE, fragments.change, part.shard)


def _weight_hops(spec: TrainSpec, group: ParamGroup, leaf: ParamLayout) -> Iterator[_LeafHop]:
    """The gathers of a leaf. Frozen weights travel in their stored format, and are decoded in the node."""
    zero, strategy, own = spec.zero, spec.strategy, leaf.weights
    over_node = own.local if leaf.frozen else own.node
    source, keep = (strategy.frozen,) * 2 if leaf.frozen else (strategy.source, strategy.keep)
    if leaf.in_every_node:
        source = keep = "secondary"

    def gather(phase: str, times: float, *, node: bool) -> Iterator[_LeafHop]:
        if node:
            yield _LeafHop(leaf, phase, NODE, over_node, leaf.shard, times, coded=not leaf.frozen)
        # A secondary row is encoded shard by shard. Blocks divide shards, so the bytes are the same.
        if leaf.parts == 1:
            yield _LeafHop(leaf, phase, LOCAL, own.local, leaf.secondary, times)

    if zero.stage in (1, 2):
        yield from gather("weights forward", 1, node=True)
    if zero.stage < 3:
        return
    if zero.weights_delta and not leaf.frozen and not leaf.in_every_node:
        yield _LeafHop(leaf, "delta", NODE, over_node, leaf.shard)
        if zero.delta_resync:
            yield _LeafHop(leaf, "resync", NODE, own.local, leaf.shard, usual=False)
    yield from gather("weights forward", zero.passes, node=source == "primary")
    if group.unit is not None:
        # A prefetching scan still has its last layer in the backward pass.
        prefetched = bool(group.stack) and isinstance(spec.adapter, NNXAdapter)
        again = 1 - 1 / group.layers if prefetched else 1
        yield from gather("weights backward", zero.passes * again, node=keep == "primary")


def _gradient_hops(spec: TrainSpec, leaf: ParamLayout) -> Iterator[_LeafHop]:
    """The reductions of a leaf's gradients, and at stage 0 the gathers of the sums."""
    if leaf.frozen:
        return
    zero, strategy = spec.zero, spec.strategy
    first, second = leaf.grads.local, leaf.grads.node
    passes = 1 if strategy.grad_level == "full" else zero.passes
    if zero.grads_hops == 1:
        yield _LeafHop(leaf, "gradients", "node+local", second, leaf.shard, passes, summed=True)
    else:
        once = 1 if strategy.grad_level == "secondary" else passes
        if leaf.parts == 1:
            yield _LeafHop(leaf, "gradients", LOCAL, first, leaf.secondary, passes, summed=True)
        yield _LeafHop(leaf, "gradients", NODE, second, leaf.shard, once, summed=True)
    if leaf.sums:
        phase = "gradients" if strategy.sums_in_pass else "gradient sums"
        yield _LeafHop(leaf, phase, NODE, leaf.sums, leaf.shard)
    if zero.stage == 0:
        yield _LeafHop(leaf, "gradients", NODE, second, leaf.shard)
        yield _LeafHop(leaf, "gradients", LOCAL, second, leaf.secondary)


def _optimizer_hops(spec: TrainSpec) -> Iterator[_LeafHop]:
    """The exchanges, there and back, of matrices that the optimizer needs whole (``zerojax.optim.muon``)."""
    if spec.zero.stage == 0:
        return
    codec = Codec(spec.zero.compute_format, spec.zero.block_size)
    for same in by_shape(spec.matrices):
        leaf, sent = same[0], most_dealt(same) * same[0].owned
        for axis in ["node+local"] if len(dealt_over(leaf)) > 1 else dealt_over(leaf):
            yield _LeafHop(leaf, "optimizer", axis, codec, sent, 2 / leaf.layers, coded=False)


def hops_table(
    hops: Sequence[HopPlan],
    title: str = "Expected bytes that one device sends per step",
    seconds: Callable[[HopPlan], tuple[float, float]] | None = None,
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


def usual_bytes(hops: Sequence[HopPlan]) -> tuple[int, int]:
    """Bytes that one device sends in a usual step: (within its node, to other nodes)."""
    usual = [hop for hop in hops if hop.usual]
    return sum(hop.local_bytes for hop in usual), sum(hop.node_bytes for hop in usual)
