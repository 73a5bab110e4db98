"""The node's replica of the weights, for passes that read the same weights more than once.

Each forward pass brings a state's weights across nodes. Evaluations, log-probabilities and generation make
many passes between two updates, and the next step makes one more. With the replica, the weights cross once.
Like frozen weights (``zerojax.train.frozen``) it consists of the secondary partitions of ZeRO++ (section
3.2), stored once per node, with exactly the values that each pass would compute with.
"""

from collections.abc import Callable

import jax
from jaxtyping import PyTree

from zerojax.comm.xla_options import compiler_options
from zerojax.train.fields import Shards, abstract_replicas, on_devices, specs_of
from zerojax.train.memory import device_bytes
from zerojax.train.pass_weights import ByPath, secondary_partitions
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState, check_there


def with_replica(state: TrainState) -> TrainState:
    """The state with a replica of its weights in every node: following passes send no weights between nodes.

    Use it for several calls of ``eval_step``, ``predict_step`` or ``generate`` between two updates, and at
    stage 3 the ``train_step`` after them. They compute with the same weights as without it; in bf16 the
    compiler may round intermediate results elsewhere. The step, and ``TrainState.replace`` of weights, drop
    the replica. With ``weights_delta`` it stays, because it is delta's own, refreshed a little earlier.

    Args:
        state: any; it is not donated.

    Returns:
        The state with the replica, which takes two bytes per parameter, or fewer with
        ``ZeroConfig.local_weights``, over the devices of a node. The state itself if no pass sends weights:
        on one node, at stage 0, and if all weights are frozen and in every node.

    Raises:
        ConfigurationError: the state is abstract or was donated.

    Examples:
        >>> copied = zerojax.with_replica(state)
        >>> losses = [zerojax.eval_step(copied, batch)["loss"] for _ in range(3)]  # one exchange
    """
    check_there(state)
    if not lacks_replica(state):
        return state
    return state.replace(replicas=replicas_in_node(state), current_replicas=True)


def lacks_replica(state: TrainState) -> bool:
    """Whether a pass of the state sends weights between nodes that a replica would make unnecessary."""
    spec = state.spec.reading
    if spec.world.nodes == 1 or spec.zero.stage == 0 or state.current_replicas:
        return False
    return bool(abstract_replicas(spec, frozen=True))  # not if every node has all weights anyway


def replicas_in_node(state: TrainState, *, every: bool = False) -> ByPath:
    """Replicas of the current weights, without frozen ones that every node has already.

    With ``every`` also of weights whose masters every node holds, which a pass otherwise encodes as it goes.
    """
    spec = state.spec.reading
    there = state.replicas if state.current_replicas else {}
    wanted = abstract_replicas(spec, frozen=True)
    if every:
        held = (leaf for leaf in spec.leaves if leaf.in_every_node)
        wanted |= {leaf.path: spec.stored(leaf, "secondary") for leaf in held}
    lacking = {path: copy for path, copy in wanted.items() if path not in there}
    if not lacking:
        return state.replicas

    def replicas() -> Callable[[TrainState], ByPath]:
        return per_node(spec, lambda weights: {path: weights[path] for path in lacking}, lacking)

    return there | spec.once(f"node copy {every} {state.current_replicas}", replicas)(state)


def per_node[T: PyTree](
    spec: TrainSpec, local: Callable[[ByPath], T], wanted: T
) -> Callable[[TrainState], T]:
    """The compiled function from a state to ``local``'s result for the weights in a node.

    ``local`` goes from the secondary partition of every weight, on one device, to a pytree of arrays;
    ``wanted`` has their global shapes and shardings.
    """

    def of_shards(every: Shards) -> T:
        return on_devices(
            spec, lambda own: local(secondary_partitions(spec, own)), every, out_specs=specs_of(wanted)
        )

    program = jax.jit(of_shards, compiler_options=compiler_options(spec.mesh))
    return lambda state: program(state.shards)


def replica_bytes(spec: TrainSpec) -> int:
    """Bytes of the replica on one device."""
    return device_bytes(abstract_replicas(spec, frozen=True))
