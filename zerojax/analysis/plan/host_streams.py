"""The copies between a device and its host's memory in a step (``ZeroConfig.host``).

Time and memory follow from this description. The bytes of a stream take time in its part of the step, and
some of its layers are on the device meanwhile.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from zerojax.train.spec import ParamGroup, TrainSpec

Part = Literal["forward", "backward", "update", "exchange"]
PARTS: tuple[Part, ...] = get_args(Part)

# One layer is used while another is copied.
_FETCHED = 2
# One layer arrives, one is updated and one leaves. After the passes, a GPU's loop has two iterations in its
# body.
_UPDATED_IN_BACKWARD, _UPDATED = 3, 5
# A fragment of local updates arrives to be sent, to be mixed in, and before it is written.
_FRAGMENT_READS = 3


class HostStream(NamedTuple):
    """State in host memory that is copied in one part of a step.

    Attributes:
        kinds: its kinds of memory (``zerojax.analysis.plan.memory.KINDS``).
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
