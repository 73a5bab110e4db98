"""Measures the speed of a mesh's links and devices, and recommends a preset."""

import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zerojax.analysis.link_report import CollectiveTime
from zerojax.sharding.mesh import AXES, LOCAL, NODE

# Bytes that a node sends to others in a step, as multiples of M = 2 bytes per parameter (README).
NETWORK_BYTES = {"zero3": 3.0, "zero++": 0.75, "delta": 0.5}
# The recommendation assumes this many tokens per device and step: 4 sequences of 2048.
TOKENS = 8192
# Roughly the fraction of a single matrix product's speed that a training step reaches.
_REACHED = 0.5
# A measurement grows until it takes this many seconds, or this many bytes per device.
_LONG_ENOUGH = 0.02
_MAX_BYTES = 1 << 27


@dataclass(frozen=True)
class Link:
    """The measured speed of one mesh axis.

    Attributes:
        bytes_per_second: rate at which each device sends (and receives) while all devices do.
        seconds: duration of a gather of a few bytes.
    """

    bytes_per_second: float
    seconds: float


def measure_link(mesh: Mesh, axis: str) -> Link | None:
    """Time all-gathers over one axis. All processes must call it together.

    Returns:
        The link, or None if the axis has a single device.
    """
    peers = mesh.shape[axis]
    if peers == 1:
        return None
    latency = _time_gather(mesh, axis, 64)
    size = 1 << 20
    while (seconds := _time_gather(mesh, axis, size)) < _LONG_ENOUGH and size < _MAX_BYTES:
        size *= 8
    return Link((peers - 1) * size / max(seconds - latency, 1e-9), latency)


def measure_matmul() -> list[float]:
    """Measure the FLOP/s of a matrix product on one device of each process, in the order of ranks.

    The product is in bf16 on accelerators, and in fp32 on CPUs, where bf16 is slow. A process that is far
    slower than the others delays every step.
    """
    accelerated = jax.default_backend() != "cpu"
    n, dtype = (8192, jnp.bfloat16) if accelerated else (512, jnp.float32)
    with jax.default_device(jax.local_devices()[0]):
        x = jnp.ones((n, n), dtype)
        product = jax.jit(lambda x: x @ x)
        seconds = _best_time(lambda: product(x))
    rates = multihost_utils.process_allgather(np.asarray([2 * n**3 / seconds]))
    return [float(rate) for rate in np.ravel(rates)]


def tokens_to_hide(preset: str, node_bytes_per_second: float, device_flops: float) -> float:
    """The fewest tokens per device and step with which compute hides the communication between nodes.

    For P parameters and T tokens a device computes 6 P T FLOPs in a step, and its node's link carries a
    multiple of 2 P bytes. P cancels.
    """
    return NETWORK_BYTES[preset] * 2 * _REACHED * device_flops / (6 * node_bytes_per_second)


def advise(node: Link | None, local: int, device_flops: float) -> tuple[str, str]:
    """Recommend a preset: (its name, the reason).

    Args:
        node: one device's part of the link that its node's devices share; None if there is one node.
        local: devices of a node.
        device_flops: FLOP/s of a matrix product.
    """
    if node is None:
        return "zero3", "there is one node, so exact communication costs nothing"
    needed = {
        name: tokens_to_hide(name, node.bytes_per_second * local, device_flops) for name in NETWORK_BYTES
    }
    hidden = [name for name, tokens in needed.items() if tokens <= TOKENS]
    listed = ", ".join(f"{name} from {tokens:,.0f}" for name, tokens in needed.items())
    why = f"hidden behind compute, by tokens per device and step: {listed}"
    if hidden:
        return hidden[0], f"{why}; {hidden[0]} is the most exact preset that {TOKENS:,} tokens hide"
    every = LEAST_EVERY
    while needed["delta"] > every * TOKENS:
        every *= 2
    return "local", (
        f"{why}; {TOKENS:,} tokens hide none. They hide local updates with zero.every = {every}. Each node "
        f"then trains its own weights and holds the whole state: {expected_loss(every)}"
    )


def time_collectives(mesh: Mesh, sizes: Sequence[int]) -> tuple[CollectiveTime, ...]:
    """Time the collectives that carry weights and gradients between nodes. All processes call it together.

    Args:
        mesh: of at least two nodes.
        sizes: bytes that each device sends to other nodes in a collective, about.
    """
    nodes = mesh.shape[NODE]

    def exchange(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, NODE, split_axis=0, concat_axis=0, tiled=True)

    times: list[CollectiveTime] = []
    for size in sizes:
        piece = max(1, size // (nodes - 1))
        sent = (nodes - 1) * piece
        times.append(CollectiveTime("all-gather", sent, _time_gather(mesh, NODE, piece)))
        times.append(CollectiveTime("all-to-all", sent, _time(mesh, nodes * piece, exchange)))
    return tuple(times)


def _time_gather(mesh: Mesh, axis: str, size: int) -> float:
    """Seconds of an all-gather of ``size`` bytes per device: the best time of the slowest process."""
    return _time(mesh, size, lambda x: jax.lax.all_gather(x, axis, tiled=True))


def _time(mesh: Mesh, size: int, collective: Callable[[jax.Array], jax.Array]) -> float:
    """Seconds of a collective on ``size`` bytes per device: the best time of the slowest process."""
    everywhere = PartitionSpec(AXES)

    def run(x: jax.Array) -> jax.Array:
        # The barrier keeps XLA from optimising parts of the collective away.
        return jax.lax.optimization_barrier(collective(x))[:1]

    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
    sharding = NamedSharding(mesh, everywhere)
    local = np.zeros(mesh.local_mesh.size * size, np.uint8)
    x = jax.make_array_from_process_local_data(sharding, local, (mesh.size * size,))
    seconds = _best_time(lambda: step(x))
    return float(np.max(multihost_utils.process_allgather(np.asarray([seconds]))))


def _best_time(run: Callable[[], Any]) -> float:
    """Seconds of the shortest of three runs, after one that compiles."""
    _, *times = timeit.repeat(lambda: jax.block_until_ready(run()), repeat=4, number=1)
    return min(times)


def links_of(mesh: Mesh) -> dict[str, Link | None]:
    """The links of both axes of a mesh."""
    return {axis: measure_link(mesh, axis) for axis in (LOCAL, NODE)}


LOSS_ABOVE_ZERO3: dict[str, dict[int, float]] = {
    "adamw": {16: 6.0, 64: 7.5, 128: 9.3},
    "muon": {16: 6.7, 64: 8.4, 128: 11.3},
}
"""Percent by which the validation loss exceeds zero3's with the same optimizer, by optimizer and ``every``.

Two nodes continued to train weights of 124M parameters for 400 steps, each way at the best of a few learning
rates. Four nodes with Muon and ``every=64`` ended 17.7% above. docs/quality.md has these runs. It also has
runs from random weights, which end 1.5% (21 tokens a parameter) to 33% above."""
LEAST_EVERY = 16
"""The smallest ``every`` to recommend, because no smaller one was measured.

In a shorter round a fragment travels for a larger part of the round, and the nodes' changes of it meanwhile
are lost (``ZeroConfig.outer_delay``)."""


def expected_loss(every: int, *optimizers: str) -> str:
    """A sentence about the loss of quality to expect from local updates.

    Args:
        every: as ``ZeroConfig.every``. The figure is of the next larger one that was measured.
        optimizers: names; none stands for all that were measured.
    """
    each = ", ".join(_figure(name, every) for name in optimizers or LOSS_ABOVE_ZERO3)
    return (
        f"the validation loss was above zero3's, {each}, in 400 steps of 124M parameters on two nodes (on "
        "four nodes muon lost twice as much; runs of many tokens per parameter lose less: docs/quality.md)"
    )


def _figure(optimizer: str, every: int) -> str:
    measured = LOSS_ABOVE_ZERO3.get(optimizer, {})
    longer = [known for known in measured if known >= every]
    if not longer:
        return f"by an unmeasured amount with {optimizer}"
    return f"by {measured[min(longer)]:.2g}% with {optimizer} and zero.every = {min(longer)}"
