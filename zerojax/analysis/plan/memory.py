"""The memory of one device during a training step, by kind, from formulas.

With N parameters on D devices in nodes of L, bf16 compute and Adam, the bytes are (ZeRO, section 5, with fp32
sums at the owners)

=========== ============== ============== ================ ====================
stage       master, Adam   gradient sums  weights whole    gradients whole
=========== ============== ============== ================ ====================
0           12 N           in place       2 N              2 N, then the sums
1           12 N / D       4 N / D        2 N              2 N
2           12 N / D       4 N / D        2 N              one unit
3           12 N / D       4 N / D        two units        one unit
=========== ============== ============== ================ ====================

Where a stack keeps activations, its sums take their place from the last layer to the first and need no
memory of their own (``zerojax.schedule.sum_storage``). Matrices that the optimizer needs whole (Muon) take
12 N / L, in place of the above and of hpZ or delta weights. Those add 2 N / L; weights computed with in fp8
take one byte instead of two where they are gathered or copied. Frozen weights have neither masters nor
gradients: their bytes, in the format in which they are stored, over L. What ``ZeroConfig.host`` names is in
host memory. Of masters and optimizer the device then has five layers during the update (one arrives, one is
updated, one leaves, and a GPU's loop has two iterations in its body), those of units in no stack two at a
time and, of the whole model, what a pass sends: 2 N / D. Of stacks that the backward pass updates it has
three layers then, and sums of one. Of weights there are two layers, of activations the last and two others.
With masters or activations in host memory, sums take memory of their own.

Activations depend on the model and the batch (``work.py``). With them, the peak is at one of five moments:
in the backward pass; in the forward pass, with frozen tables of embeddings; with a large vocabulary, in the
loss, when there are logits but no gradients yet (except sums of earlier micro-batches); at the end, when
there are the fp32 gradients of the embedding tables; or in the update, with Muon or host memory.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import jax.numpy as jnp
from jaxtyping import PyTree
from rich.table import Table

from zerojax.analysis.plan.work import Work
from zerojax.formatting import numeric, size
from zerojax.optim.muon import by_shape, most_dealt
from zerojax.sharding.layout import ParamLayout
from zerojax.train.fields import abstract_fields
from zerojax.train.memory import device_bytes, host_bytes
from zerojax.train.spec import ParamGroup, TrainSpec

KINDS = {
    "parameters": "fp32 master weights",
    "optimizer": "the optimizer's state",
    "outer": "outer weights, their momentum, and the node's copy of them",
    "encoded": "of masters in host memory: what the next pass sends",
    "frozen": "weights that are not trained, encoded",
    "gradients": "sums, at their owners",
    "secondary": "hpZ's or delta's node-local copy",
    "residual": "error feedback",
    "other": "non-parameter state",
    "weights": "gathered: units in use, or all of them",
    "weight gradients": "not yet summed: of units in use, or of all",
    "wire": "gradients of a unit, encoded, sent and arriving",
    "activations": "kept for the backward pass, and of the current layer",
    "matrices": "in the update, whole: Muon's",
    "streamed": "layers of what is in host memory, here for a while",
    "workspace": "of the matmul library",
}
"""The kinds of memory of a device, and of its part of a host's."""

_LAYERS_UPDATED = 5
_LAYERS_UPDATED_IN_BACKWARD = 3
_LAYERS_FETCHED = 2
_LAYERS_MOVED = 2


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes on one device at the peak of a step.

    Attributes:
        kinds: bytes by ``KINDS``.
        host: bytes in host memory, for each device, by those of ``KINDS`` that are there.
    """

    kinds: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """The sum over all kinds, on the device."""
        return sum(self.kinds.values())

    @property
    def host_total(self) -> int:
        """The sum over all kinds, in host memory."""
        return sum(self.host.values())

    def wherever(self, kind: str) -> int:
        """Bytes of a kind in either memory."""
        return self.kinds[kind] + self.host.get(kind, 0)

    @property
    def lasting(self) -> int:
        """Bytes that stay from step to step."""
        names = ("parameters", "optimizer", "outer", "encoded", "frozen", "residual", "other")
        return sum(self.kinds[name] for name in names)

    def table(self, title: str | None = None, of: str = "") -> Table:
        """A table by kind, without empty kinds.

        Args:
            title: None for the default.
            of: a remark on the total, such as the budget.
        """
        without = "" if self.kinds["activations"] else ", without activations"
        title = title or f"Memory of one device in a step{without}"
        table = Table("kind", "what it is", *numeric("bytes"), title=title)
        for kind, count in self.kinds.items():
            if count:
                table.add_row(kind, KINDS[kind], size(count))
        table.add_section()
        table.add_row("total", of, size(self.total))
        if self.host:
            table.add_section()
            for kind, count in self.host.items():
                table.add_row(f"host: {kind}", KINDS[kind], size(count))
            table.add_row("host: total", "in page-locked memory of its host", size(self.host_total))
        return table


def predict_memory(spec: TrainSpec, work: Work | None = None, *, workspace: int = 0) -> PredictedMemory:
    """The peak memory of a training step.

    Args:
        spec: of the step.
        work: gives its activations; None counts the backward pass without any.
        workspace: bytes of the matmul library.
    """
    lasting = spec.once("bytes held", lambda: _held_bytes(spec, device_bytes))
    host = {kind: count for kind, count in _in_host(spec).items() if count}
    if work is not None and (moved := _moved_activations(spec.training, work)):
        host["activations"] = moved
    passes = spec.training
    moments = [_in_backward(passes, work), _in_update(passes)]
    if work is not None:
        moments += [_in_forward(passes, work), _in_loss(passes, work), _at_end(passes, work)]
    fullest = max(moments, key=lambda moment: sum(moment.values()))
    kinds = {kind: lasting.get(kind, 0) + fullest.get(kind, 0) for kind in KINDS}
    return PredictedMemory(kinds | {"workspace": workspace}, host)


def _in_host(spec: TrainSpec) -> dict[str, int]:
    """The bytes of a train state in host memory, for one device, by kind."""
    return spec.once("bytes in host memory", lambda: _held_bytes(spec, host_bytes))


def _held_bytes(spec: TrainSpec, count: Callable[[PyTree], int]) -> dict[str, int]:
    """The bytes of one device's part of a train state that ``count`` counts, by kind."""
    fields = abstract_fields(spec)
    params, local = fields["params"], fields["local"]
    if local is None:
        own, outer = params, ()
    else:
        own, outer = local.weights, (params, local.momentum, local.known)
    held = {
        "parameters": own,
        "outer": outer,
        "optimizer": fields["opt_state"],
        "encoded": fields["encoded"],
        "frozen": fields["frozen"],
        "secondary": fields["copies"],
        "residual": fields["residual"],
        "other": fields["model_state"],
    }
    return {kind: count(tree) for kind, tree in held.items()}


def _here(
    spec: TrainSpec,
    held: int,
    layers: int,
    *,
    frozen: bool = False,
    groups: Collection[ParamGroup] | None = None,
) -> int:
    """Of what is in host memory for weights, the bytes that are on the device at a time.

    There are two groups, of which one is done when the next but one begins.

    Args:
        spec: of the step.
        held: all bytes.
        layers: of a stack at a time; of a group that is no stack there is everything.
        frozen: whether it is for frozen weights, rather than for trained ones.
        groups: of which there may be any on the device; None for all.
    """
    sizes = [
        (sum(leaf.owned for leaf in (group.frozen if frozen else group.leaves)), group.layers, group)
        for group in spec.groups
    ]
    whole = sum(size * copies for size, copies, _ in sizes)
    some = [(size, copies) for size, copies, group in sizes if groups is None or group in groups]
    parts = sorted((size * min(layers, copies) for size, copies in some), reverse=True)
    return held * sum(parts[:2]) // max(1, whole)


def _fetched(spec: TrainSpec) -> int:
    """Weights in host memory that are here during a pass."""
    held = _in_host(spec)
    trained = _here(spec, held["encoded"], _LAYERS_FETCHED)
    return trained + _here(spec, held["frozen"], _LAYERS_FETCHED, frozen=True)


def _updated(spec: TrainSpec, *, in_backward: bool = False) -> int:
    """Masters and moments in host memory that are here during the update, or that of the backward pass."""
    held = _in_host(spec)["parameters"] + _in_host(spec)["optimizer"]
    own = spec.updated_in_backward
    groups = own if in_backward else [group for group in spec.groups if group not in own]
    layers = _LAYERS_UPDATED_IN_BACKWARD if in_backward else _LAYERS_UPDATED
    return _here(spec, held, layers, groups=groups)


def _moved_activations(spec: TrainSpec, work: Work) -> int:
    """Bytes of activations that stacks keep in host memory: of all layers but the last."""
    if "activations" not in spec.zero.host:
        return 0
    moved = sum(group.layers - 1 for group in spec.unit_groups if group.stack)
    every = max(1, sum(group.layers for group in spec.unit_groups))
    return round(spec.zero.host_activations * work.kept * _together(spec) * moved) // every


def _kept(spec: TrainSpec, work: Work) -> int:
    """Bytes of activations that are kept on the device, or on their way."""
    moved = _moved_activations(spec, work)
    others = max((group.layers - 1 for group in spec.unit_groups if group.stack), default=0)
    on_their_way = moved * min(_LAYERS_MOVED, others) // max(1, others)
    return work.kept * _together(spec) - moved + on_their_way


def _in_backward(spec: TrainSpec, work: Work | None) -> dict[str, int]:
    # Exact weights that cross nodes again in the backward pass are in flight two layers ahead, in addition to
    # the gradients.
    again = spec.strategy.keep == "primary" and spec.world.nodes > 1
    return {
        "gradients": _gradients(spec) - (_in_place_of_activations(spec, work) if work else 0),
        "secondary": _hpz_copy(spec),
        "weights": _gathered(spec, 4 if again else 2) + _frozen_in_use(spec),
        "weight gradients": _whole_gradients(spec, rest=work is None),
        "wire": _payload(spec),
        "activations": _kept(spec, work) + work.working + _others(spec, work) + work.head if work else 0,
        "streamed": _fetched(spec) + _updated(spec, in_backward=True),
    }


def _in_forward(spec: TrainSpec, work: Work) -> dict[str, int]:
    """At the start of a layer, while all its weights are there."""
    return _in_loss(spec, work) | {
        "weights": _gathered(spec, 2) + _frozen_in_forward(spec),
        "activations": _kept(spec, work) + 2 * work.stream + _others(spec, work),
    }


def _in_loss(spec: TrainSpec, work: Work) -> dict[str, int]:
    """Between the passes, in the loss.

    Sums over micro-batches are there all the time. The zeros that a backward pass starts from are allocated
    before it if they are wider than a shard, in all compiled programs examined.
    """
    strategy = spec.strategy
    early = strategy.grad_level != "primary"
    if spec.zero.stage > 0 and strategy.grad_level != "full":
        sets = (1 + early) if spec.zero.passes > 1 else 0
        gradients = sets * _gradient_sums(spec)
    else:
        gradients = 0
    return {
        "gradients": gradients,
        "secondary": _hpz_copy(spec),
        "weights": _gathered(spec, 1) + _frozen_in_loss(spec),
        "weight gradients": _whole_gradients(spec) if strategy.grad_level == "full" else 0,
        "activations": _kept(spec, work) + _loss(spec, work),
        "streamed": _fetched(spec),
    }


def _at_end(spec: TrainSpec, work: Work) -> dict[str, int]:
    """At the end, when the embedding's gradient exists and leaves outside units are reduced."""
    sharded = spec.strategy.grad_level != "full"
    return {
        "gradients": _gradients(spec) + _sums_in_nodes(spec),
        "weights": _gathered(spec, 0),
        "weight gradients": _of_no_unit(spec) if sharded else _whole_gradients(spec),
        "wire": _of_no_unit(spec) if sharded else 0,
        "activations": work.tables,
    }


def _in_products(leaf: ParamLayout) -> int:
    """Elements of the product of a matrix with itself; of experts, of all of these."""
    return math.prod(leaf.shape[:-2]) * min(leaf.shape[-2:]) ** 2


def _in_update(spec: TrainSpec) -> dict[str, int]:
    """In the update, while a device has whole matrices of one shape, as many as it gets of all at most.

    In compiled programs in fp32 as they come and as they become, and in the compute dtype as they are sent.
    Where they cross nodes, gradients stay until all are back: those of other shapes are sent and arrive
    besides, and there are three products of a matrix with itself.
    """
    item = jnp.dtype(spec.zero.compute_dtype).itemsize
    shapes = by_shape(spec.matrices) if spec.zero.stage else []
    dealt = [most_dealt(same) * same[0].on_device.padded for same in shapes]
    one_by_one = [(4 + 4 + item) * elements for elements in dealt]
    crossing = [
        (4 + 4) * elements
        + 3 * 4 * most_dealt(same) * _in_products(same[0].on_device)
        + 2 * item * (sum(dealt) - elements)
        for same, elements in zip(shapes, dealt, strict=True)
        if spec.world.nodes > 1 and not same[0].in_every_node
    ]
    return {
        "gradients": _gradients(spec) + _sums_in_nodes(spec),
        "matrices": max([*one_by_one, *crossing], default=0),
        "streamed": _updated(spec),
    }


def _together(spec: TrainSpec) -> int:
    """Micro-batches that go through a layer before the next layer."""
    return spec.zero.accumulate // spec.zero.passes


def _loss(spec: TrainSpec, work: Work) -> int:
    """Activations during one micro-batch's loss; in breadth the tables' gradients are summed over all."""
    return work.loss + (work.tables + _others(spec, work) if _together(spec) > 1 else 0)


def _others(spec: TrainSpec, work: Work) -> int:
    """The residual stream of the other micro-batches at a layer: input and output."""
    return 2 * (_together(spec) - 1) * work.stream


def _gradient_sums(spec: TrainSpec) -> int:
    """One fp32 set of gradient sums, sharded over the world or over the node.

    Of a stack that the backward pass updates there are those of one layer.
    """
    once = {leaf.path for group in spec.updated_in_backward for leaf in group.leaves}
    return sum((1 if leaf.path in once else leaf.layers) * _sum_bytes(spec, leaf) for leaf in spec.leaves)


def _sum_bytes(spec: TrainSpec, leaf: ParamLayout) -> int:
    """Bytes of one layer of a leaf's gradient sum on one device."""
    return 4 * (leaf.shard if spec.strategy.grad_level == "full" else spec.strategy.grad_size(leaf))


def _gradients(spec: TrainSpec) -> int:
    """Sums at ``grad_level``, and a second set of them while micro-batches are summed."""
    if spec.zero.stage == 0:
        return 0  # the sums replace the gradients in place
    twice = spec.zero.passes > 1 and spec.strategy.grad_level != "full"
    return _gradient_sums(spec) * (2 if twice else 1)


def _sums_in_nodes(spec: TrainSpec) -> int:
    """Sums that all nodes need, where they arrive once per step and their owners hold others till then."""
    if spec.strategy.sums_in_pass or spec.strategy.grad_level != "primary":
        return 0
    return sum(4 * leaf.layers * leaf.owned for leaf in spec.leaves if leaf.in_every_node)


def _in_place_of_activations(spec: TrainSpec, work: Work) -> int:
    """The sums of stacks that are kept where activations of layers that are done were.

    Of each stack all layers but one take part (``zerojax.schedule.sum_storage``).
    """
    if spec.zero.stage < 3 or spec.strategy.residuals_in_host or spec.strategy.reads_layers:
        return 0
    stacks = [group for group in spec.unit_groups if group.stack]
    sums = sum(_sum_bytes(spec, leaf) * (leaf.layers - 1) for group in stacks for leaf in group.leaves)
    layers = sum(group.layers for group in spec.unit_groups)
    others = sum(group.layers - 1 for group in stacks)
    return min(sums, work.kept * _together(spec) * others // max(layers, 1))


def _hpz_copy(spec: TrainSpec) -> int:
    """The node-local weights that the forward pass keeps for the backward pass."""
    if (spec.strategy.source, spec.strategy.keep) != ("primary", "secondary"):
        return 0
    return sum(
        leaf.layers * spec.world.nodes * leaf.weights.local.row_bytes(leaf.shard)
        for group in spec.unit_groups
        for leaf in group.leaves
        if not leaf.in_every_node
    )


def _weight_bytes(spec: TrainSpec, leaf: ParamLayout) -> int:
    """Bytes of one whole layer of a leaf as it is gathered: in its compute dtype, or in fp8."""
    return leaf.on_device.padded if leaf.fp8 else _gradient_bytes(spec, leaf)


def _gradient_bytes(spec: TrainSpec, leaf: ParamLayout) -> int:
    """Bytes of one whole layer of a leaf's gradient, in the compute dtype."""
    return leaf.on_device.padded * spec.strategy.weight_dtype(leaf).itemsize


def _gathered(spec: TrainSpec, units: int) -> int:
    """Trained weights that are whole at the same time: below stage 3 all, else some units and the rest."""
    if spec.zero.stage < 3:
        return sum(leaf.layers * _weight_bytes(spec, leaf) for leaf in spec.leaves)
    return _of_no_unit(spec) + sum(_largest_units(spec, _weight_bytes, units))


def _frozen_in_use(spec: TrainSpec) -> int:
    """Frozen weights of units in a pass: one unit's, decoded, while the next one's arrive.

    The backward pass reads none of those outside units.
    """
    if not spec.unit_groups:
        return _of_no_unit(spec, frozen=True)
    used, arriving = (
        sum(_largest_units(spec, of, 1, frozen=True)) for of in (_weight_bytes, _frozen_on_the_way)
    )
    return used + arriving


def _frozen_in_forward(spec: TrainSpec) -> int:
    """The same in the forward pass, which begins to gather what is outside units before the first unit."""
    if not spec.unit_groups:
        return _of_no_unit(spec, frozen=True)
    return _frozen_in_use(spec) + sum(_frozen_arriving(spec, leaf) for leaf in _frozen_outside(spec))


def _frozen_in_loss(spec: TrainSpec) -> int:
    """Frozen weights that are whole in the loss: of a unit, and the largest of those outside units."""
    outside = (leaf.layers * _weight_bytes(spec, leaf) for leaf in _frozen_outside(spec))
    return max(outside, default=0) + sum(_largest_units(spec, _weight_bytes, 1, frozen=True))


def _frozen_outside(spec: TrainSpec) -> list[ParamLayout]:
    return [leaf for group in spec.groups if group.unit is None for leaf in group.frozen]


def _frozen_on_the_way(spec: TrainSpec, leaf: ParamLayout) -> int:
    """Bytes of one layer of a frozen weight while it is gathered.

    Besides what arrives these are a device's own rows, cut out of the stack, and on the way between nodes.
    """
    if not (arriving := _frozen_arriving(spec, leaf)):
        return 0
    own = leaf.weights.local.row_bytes(leaf.shard)
    in_node = spec.world.nodes * own
    crossing = spec.strategy.frozen == "primary" and spec.world.nodes > 1
    return arriving + in_node + (in_node + own) * crossing


def _frozen_arriving(spec: TrainSpec, leaf: ParamLayout) -> int:
    """Bytes of one layer as it is gathered, in the format in which it is stored; 0 if nothing is sent."""
    holders = spec.world.size if spec.strategy.frozen == "primary" else spec.world.local
    in_node = spec.world.nodes * leaf.weights.local.row_bytes(leaf.shard)
    return leaf.on_device.world.local * in_node if holders > 1 else 0


def _whole_gradients(spec: TrainSpec, *, rest: bool = True) -> int:
    """Gradients before they are summed: all of them at stages 0 and 1, else those of a unit and of the rest.

    Quantized gradients are encoded leaf by leaf: only the largest leaf's is whole.
    """
    if spec.strategy.grad_level == "full":
        item = jnp.dtype(spec.strategy.grad_dtype).itemsize
        every = sum(leaf.on_device.count * item for leaf in spec.leaves)
        return every * (2 if spec.zero.passes > 1 else 1)
    outside = _of_no_unit(spec) if rest else 0
    if all(leaf.grads.local.raw for leaf in spec.leaves):
        return outside + sum(_largest_units(spec, _gradient_bytes, 1))
    in_units = [leaf for group in spec.unit_groups for leaf in group.leaves]
    return outside + max((_gradient_bytes(spec, leaf) for leaf in in_units), default=0)


def _payload(spec: TrainSpec) -> int:
    """A unit's encoded gradients, sent and arriving; raw ones are sent as they are.

    Rotated ones also exist in fp32 if XLA runs the codec rather than a kernel. Between two hops one unit's
    gradients wait, one's are sent and one's arrive. Below stage 3 gradients do not queue behind the backward
    pass.
    """
    strategy = spec.strategy
    hops = len(strategy.axes(spec.world))
    two_hops = strategy.reduces_between_nodes(spec.world) and hops == 2

    def encoded(spec: TrainSpec, leaf: ParamLayout) -> int:
        codec, peers = leaf.grads.local, spec.world.local
        rotated = 4 * leaf.padded if leaf.rotation else 0
        first = peers * codec.row_bytes(leaf.padded // peers) if leaf.parts == 1 else 0
        second = spec.world.nodes * leaf.grads.node.row_bytes(leaf.shard) if two_hops else 0
        if leaf.sums and strategy.sums_in_pass:
            second += spec.world.nodes * leaf.sums.row_bytes(leaf.shard)
        return 3 * second + (two_hops * first if codec.raw else rotated + 2 * first)

    return sum(_largest_units(spec, encoded, 1)) if spec.zero.stage == 3 else 0


def _of_no_unit(spec: TrainSpec, *, frozen: bool = False) -> int:
    """Bytes of the trained or the frozen weights outside units."""
    groups = [group.frozen if frozen else group.leaves for group in spec.groups if group.unit is None]
    return sum(leaf.layers * _weight_bytes(spec, leaf) for group in groups for leaf in group)


def _largest_units(
    spec: TrainSpec, of: Callable[[TrainSpec, ParamLayout], int], count: int, *, frozen: bool = False
) -> list[int]:
    """Bytes of the ``count`` largest units: of their trained weights, or of their frozen ones."""
    units = [
        (sum(of(spec, leaf) for leaf in (group.frozen if frozen else group.leaves)), group.layers)
        for group in spec.unit_groups
    ]
    every = [size for size, copies in units for _ in range(min(copies, count))]
    return sorted(every, reverse=True)[:count]
