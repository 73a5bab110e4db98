"""Formulas for the memory of one device during a training step, by kind.

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

hpZ and delta add 2 N / L. Weights with matmuls in fp8 take one byte instead of two wherever they are gathered
or kept in a node. Matrices that the optimizer needs whole (Muon) take 12 N / L instead of the bytes above and
of hpZ or delta. Frozen weights have neither masters nor gradients. They take their stored bytes, over L. In a
stack that keeps activations, the sums take the place of the activations, from the last layer to the first,
and need no further memory (``zerojax.schedule.sum_storage``).

``ZeroConfig.host`` moves parts to host memory. The device then has a few layers of each (``host_streams``),
and two units outside stacks. It also has the payload of a pass for the whole model, 2 N / D, and the
activations of the last layer and two others. A stack that the backward pass updates only has the sums of one
layer. With masters or activations in host memory, sums need further memory.

Activations depend on the model and the batch (``work.py``). With them, the peak is at one of five moments:

- in the backward pass;
- in the forward pass, with frozen embedding tables;
- in the loss, with a large vocabulary, when there are logits but no gradients except sums of earlier
  micro-batches;
- at the end, when the fp32 gradients of the embedding tables exist;
- in the update, with Muon or host memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, get_args

from jaxtyping import PyTree
from rich.table import Table

from zerojax.analysis.plan.param_bytes import ParamBytes
from zerojax.analysis.plan.work import Work
from zerojax.formatting import numeric, size
from zerojax.train.fields import abstract_fields
from zerojax.train.memory import device_bytes, host_bytes
from zerojax.train.spec import ParamGroup, TrainSpec

KINDS = {
    "parameters": "fp32 master weights",
    "optimizer": "the optimizer's state",
    "outer": "outer weights, their momentum, and the node's replica of them",
    "encoded": "the next pass's payload, encoded from masters in host memory",
    "frozen": "weights that are not trained, encoded",
    "gradients": "sums, at their owners",
    "secondary": "the node-local weights of hpZ or delta",
    "residual": "error feedback",
    "other": "non-parameter state",
    "weights": "gathered weights of units in use, or of all units",
    "weight gradients": "not yet summed, of units in use, or of all units",
    "wire": "encoded gradients of a unit, sent and arriving",
    "activations": "kept for the backward pass, and of the current layer",
    "matrices": "whole matrices in Muon's update",
    "streamed": "layers from host memory, during their use",
    "workspace": "reserved by the matmul library",
}
"""The kinds of memory of a device, and of its part of the host's memory."""

Part = Literal["forward", "backward", "update", "exchange"]
PARTS: tuple[Part, ...] = get_args(Part)

# One layer is used while another is copied.
_FETCHED = 2
# One layer arrives, one is updated and one leaves. After the passes, a GPU's loop has two iterations in its
# body.
_UPDATED_IN_BACKWARD, _UPDATED = 3, 5
# A fragment of local updates arrives to be sent, to be mixed in, and before it is written.
_FRAGMENT_READS = 3

_LAYERS_MOVED = 2
_NO_WORK = Work(**{each.name: 0 for each in fields(Work)})


class HostStream(NamedTuple):
    """State in host memory that is copied in one part of a step.

    Time and memory follow from this description. The bytes of a stream take time in its part of the step, and
    some of its layers are on the device meanwhile.

    Attributes:
        kinds: its kinds of memory (``KINDS``).
        part: one of the passes, the update after them, or the exchange of a fragment by local updates.
        arrives: how often its bytes are copied to the device in a step.
        leaves: how often they are copied to the host.
        groups: the groups with layers on the device meanwhile, two at a time.
        layers: the number of layers of a stack on the device.
        frozen: whether these are the groups' frozen weights.
    """

    kinds: tuple[str, ...]
    part: Part
    arrives: float
    leaves: float
    groups: Sequence[ParamGroup] = ()
    layers: int = 0
    frozen: bool = False


def host_streams(spec: TrainSpec) -> Iterator[HostStream]:
    """The streams of a step. State on the device has streams without bytes."""
    passes, groups, state = spec.zero.passes, spec.groups, ("parameters", "optimizer")
    again = passes if spec.strategy.keep == "primary" else 0
    inside = updated_in_backward(spec)
    others = [group for group in groups if group not in spec.updated_in_backward]
    yield HostStream(("encoded",), "forward", passes, 0, groups, _FETCHED)
    yield HostStream(("frozen",), "forward", passes, 0, groups, _FETCHED, frozen=True)
    yield HostStream(("activations",), "forward", 0, passes)
    yield HostStream(("encoded",), "backward", again, inside * passes, groups, _FETCHED)
    yield HostStream(("frozen",), "backward", passes, 0, groups, _FETCHED, frozen=True)
    yield HostStream(("activations",), "backward", passes, 0)
    updated = inside * passes
    yield HostStream(state, "backward", updated, updated, spec.updated_in_backward, _UPDATED_IN_BACKWARD)
    yield HostStream(state, "update", 1 - inside, 1 - inside, others, _UPDATED)
    yield HostStream(("encoded",), "update", 0, 1 - inside)
    if every := spec.zero.every:
        exchanged = ("parameters", "outer", "residual")
        yield HostStream(exchanged, "exchange", _FRAGMENT_READS / every, 1 / every)


def updated_in_backward(spec: TrainSpec) -> float:
    """The fraction of the trained elements that the backward pass updates."""
    inside = sum(leaf.layers * leaf.owned for group in spec.updated_in_backward for leaf in group.leaves)
    return inside / max(1, sum(leaf.layers * leaf.owned for leaf in spec.leaves))


@dataclass(frozen=True)
class PredictedMemory:
    """Bytes on one device at the peak of a step.

    Attributes:
        kinds: bytes for each of ``KINDS``.
        host: bytes in host memory for each device, by the kinds that are there.
    """

    kinds: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes of all kinds together on the device."""
        return sum(self.kinds.values())

    @property
    def host_total(self) -> int:
        """Bytes of all kinds together in host memory, for one device."""
        return sum(self.host.values())

    def wherever(self, kind: str) -> int:
        """Bytes of a kind in both memories together."""
        return self.kinds[kind] + self.host.get(kind, 0)

    @property
    def lasting(self) -> int:
        """Bytes that stay from step to step."""
        names = ("parameters", "optimizer", "outer", "encoded", "frozen", "residual", "other")
        return sum(self.kinds[name] for name in names)

    def table(self, title: str | None = None, of: str = "") -> Table:
        """A table of the kinds that take memory.

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
    """Predict the peak memory of a training step.

    Args:
        spec: of the step.
        work: a micro-batch's activations. None counts the backward pass without activations.
        workspace: bytes that the matmul library reserves.
    """
    lasting = spec.once("bytes held", lambda: _held_bytes(spec, device_bytes))
    host = {kind: count for kind, count in _in_host(spec).items() if count}
    moments = _Moments(spec.training, work)
    if moved := moments.moved_activations:
        host["activations"] = moved
    fullest = moments.fullest()
    kinds = {kind: lasting.get(kind, 0) + fullest.get(kind, 0) for kind in KINDS}
    return PredictedMemory(kinds | {"workspace": workspace}, host)


def _in_host(spec: TrainSpec) -> dict[str, int]:
    """Bytes of one device's part of a train state in host memory, by kind."""
    return spec.once("bytes in host memory", lambda: _held_bytes(spec, host_bytes))


def _held_bytes(spec: TrainSpec, count: Callable[[PyTree], int]) -> dict[str, int]:
    """Bytes of one device's part of a train state, by kind. ``count`` counts one of the two memories."""
    state = abstract_fields(spec)
    params, local = state["params"], state["local"]
    if local is None:
        own, outer = params, ()
    else:
        own, outer = local.weights, (params, local.momentum, local.known)
    held = {
        "parameters": own,
        "outer": outer,
        "optimizer": state["opt_state"],
        "encoded": state["encoded"],
        "frozen": state["frozen"],
        "secondary": state["replicas"],
        "residual": state["residual"],
        "other": state["model_state"],
    }
    return {kind: count(tree) for kind, tree in held.items()}


class _Moments:
    """Bytes that one device holds in addition to its train state, by kind, at each possible peak."""

    def __init__(self, spec: TrainSpec, work: Work | None) -> None:
        self.spec, self.work = spec, work or _NO_WORK
        self.with_activations = work is not None
        self.params = ParamBytes(spec)
        self.together = spec.zero.accumulate // spec.zero.passes
        """Micro-batches that go through a layer before the next layer."""
        self.stacks = [group for group in spec.unit_groups if group.stack]
        self.layers = max(1, sum(group.layers for group in spec.unit_groups))

    def fullest(self) -> dict[str, int]:
        """The moment with the most bytes."""
        moments = [self.in_backward(), self.in_update()]
        if self.with_activations:
            moments += [self.in_forward(), self.in_loss(), self.at_end()]
        return max(moments, key=lambda moment: sum(moment.values()))

    def in_backward(self) -> dict[str, int]:
        """While a layer's vjp runs."""
        work, params, strategy = self.work, self.params, self.spec.strategy
        # Weights that cross nodes again in the backward pass are in flight two layers ahead.
        again = strategy.keep == "primary" and self.spec.world.nodes > 1
        return {
            "gradients": params.sums() - self._sums_in_place_of_activations(),
            "secondary": params.hpz_copy(),
            "weights": params.gathered(4 if again else 2) + params.frozen_in_use(),
            "weight gradients": params.whole_gradients(rest=not self.with_activations),
            "wire": params.payload(),
            "activations": self._kept(_LAYERS_MOVED - 1) + work.working + self._others() + work.head,
            "streamed": self._streamed("backward"),
        }

    def in_forward(self) -> dict[str, int]:
        """At the start of a layer, while all its weights are gathered."""
        return self.in_loss() | {
            "weights": self.params.gathered(2) + self.params.frozen_in_forward(),
            "activations": self._kept() + 2 * self.work.stream + self._others(),
        }

    def in_loss(self) -> dict[str, int]:
        """In one micro-batch's loss. In breadth the gradients of tables are summed over micro-batches."""
        params, work = self.params, self.work
        in_breadth = work.tables + self._others() if self.together > 1 else 0
        return {
            "gradients": params.sums_between_passes(),
            "secondary": params.hpz_copy(),
            "weights": params.gathered(1) + params.frozen_in_loss(),
            "weight gradients": 0 if params.sums_sharded else params.whole_gradients(),
            "activations": self._kept() + work.loss + in_breadth,
            "streamed": self._streamed("forward"),
        }

    def at_end(self) -> dict[str, int]:
        """At the end, when the embedding's gradient exists and leaves outside units are reduced."""
        params = self.params
        return {
            "gradients": params.sums() + params.sums_in_nodes(),
            "weights": params.gathered(0),
            "weight gradients": params.outside() if params.sums_sharded else params.whole_gradients(),
            "wire": params.outside() if params.sums_sharded else 0,
            "activations": self.work.tables,
        }

    def in_update(self) -> dict[str, int]:
        """In the update, while a device has the whole matrices of one shape."""
        return {
            "gradients": self.params.sums() + self.params.sums_in_nodes(),
            "matrices": self.params.whole_matrices(),
            "streamed": self._streamed("update"),
        }

    @property
    def moved_activations(self) -> int:
        """Bytes of activations that stacks keep in host memory, in all layers but the last."""
        if not self.spec.zero.in_host("activations"):
            return 0
        share = self.spec.zero.host_activations
        return round(share * self.work.kept * self.together * self._layers_but_last) // self.layers

    def _kept(self, layers: int = _LAYERS_MOVED) -> int:
        """Bytes of kept activations on the device, including ``layers`` on their way to or from the host.

        The last layer's activations stay on the device until the backward pass has used them.
        """
        moved = self.moved_activations
        others = max((group.layers - 1 for group in self.stacks), default=0)
        on_their_way = moved * min(layers, others) // max(1, others)
        return self.work.kept * self.together - moved + on_their_way

    def _others(self) -> int:
        """Bytes of the other micro-batches' residual stream at a layer: input and output."""
        return 2 * (self.together - 1) * self.work.stream

    def _sums_in_place_of_activations(self) -> int:
        """Bytes of sums that take the place of finished layers' activations.

        This holds for all layers of a stack except one (``zerojax.schedule.sum_storage``).
        """
        strategy = self.spec.strategy
        if self.spec.zero.stage < 3 or strategy.residuals_in_host or strategy.reads_layers:
            return 0
        sums = sum(
            self.params.sum_of(leaf) * (leaf.layers - 1) for group in self.stacks for leaf in group.leaves
        )
        return min(sums, self.work.kept * self.together * self._layers_but_last // self.layers)

    @property
    def _layers_but_last(self) -> int:
        return sum(group.layers - 1 for group in self.stacks)

    def _streamed(self, part: Part) -> int:
        """Bytes of layers from host memory that are on the device in a part of the step."""
        held = _in_host(self.spec)
        streams = [stream for stream in host_streams(self.spec) if stream.part == part and stream.layers]
        return sum(self._here(stream, sum(held[kind] for kind in stream.kinds)) for stream in streams)

    def _here(self, stream: HostStream, held: int) -> int:
        """The part of a stream's ``held`` bytes that is on the device at a time."""

        def owned(group: ParamGroup) -> int:
            return sum(leaf.owned for leaf in (group.frozen if stream.frozen else group.leaves))

        whole = sum(owned(group) * group.layers for group in self.spec.groups)
        here = (owned(group) * min(stream.layers, group.layers) for group in stream.groups)
        parts = sorted(here, reverse=True)
        return held * sum(parts[:2]) // max(1, whole)
