"""The time of a step, from a model with few figures, each measured or from a data sheet.

The parts, in seconds per device and step:

- compute, matmuls: executed FLOPs, including recomputed ones, over the rate that matmuls and FlashAttention-4
  reach. cuDNN's attention has a lower rate.
- compute, memory: the bytes that codecs read and write, and four times the kept activations, over the
  memory's rate. Kept activations go into the stack of all layers and out of it, each by a read and a write.
- compute, products with weights in fp8: their FLOPs over the fp8 rate, and conversions (largest magnitude,
  fp8, transposition). These move 10 bytes forward and 10 backward for each element that a product reads, and
  14 for the gradient of each element that it makes.
- local and node: bytes of the hops over the rates of their links.
- optimizer: its state and the parameters, read and written once, and gradients, read or written four times
  (norm, mean, update), over the memory's rate.

In each pass over u units, hops between nodes overlap with compute, one unit ahead or behind:

    pass = local + max(compute, node) + min(compute, node) / u

Hops within a node count in full. They overlap with the matmuls, but take multiprocessors and memory bandwidth
from them. Some parts run once per step, and nothing overlaps with them: the gather of stages 1 and 2, the
gather of delta with several micro-batches, a reduction after the last micro-batch, and the optimizer.

Copies from and to host memory (``host_streams``) overlap like hops between nodes: the longest of compute,
hops and copies counts in full. The copies of the update hide its kernels, but overlap with nothing else.
Nothing hides the copies of a fragment by local updates.

With local updates and ``outer_delay`` a fragment crosses nodes during the passes of all micro-batches, which
have no hops between nodes. The step takes the longer of the two. With a delay of 1 the change of the outer
weights follows alone. Without a delay the whole exchange does.

The model excludes stragglers and input, and also latency unless links were measured (``Cluster.links``). So
units should have some megabytes.
"""

from dataclasses import asdict, dataclass

from zerojax.analysis.gpus import CUDNN_EFFICIENCY
from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.hops import ByLink, HopPlan
from zerojax.analysis.plan.memory import PARTS, Part, PredictedMemory, host_streams, updated_in_backward
from zerojax.analysis.plan.work import Work, share_of
from zerojax.train.spec import TrainSpec

_TIMES_KEPT = 4
_FP8_READ, _FP8_MADE = 10, 14
_TIMES_GRADIENTS = 4


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step on one device.

    Attributes:
        compute: matmuls, codecs, kept activations.
        local: hops within the node.
        node: hops between nodes, hidden or not.
        optimizer: the update.
        seconds: the step.
        host: copies from and to host memory, hidden or not.
        copying: seconds that these copies add to the step.
    """

    compute: float
    local: float
    node: float
    optimizer: float
    seconds: float
    host: float = 0.0
    copying: float = 0.0

    @property
    def waiting(self) -> float:
        """Seconds of the step spent on the network alone."""
        return max(0.0, self.seconds - self.compute - self.local - self.optimizer - self.copying)

    def to_dict(self) -> dict[str, float]:
        """The times as plain data, for JSON."""
        return asdict(self) | {"waiting": self.waiting}


def hop_seconds(hop: HopPlan, cluster: Cluster) -> ByLink[float]:
    """Seconds of a hop."""
    op = "all-to-all" if hop.phase in ("gradients", "optimizer", "fragment") else "all-gather"
    between = cluster.network_seconds(op, hop.node_bytes, hop.messages)
    return ByLink(hop.local_bytes / cluster.link_rate, between)


def predict_step(
    spec: TrainSpec, work: Work, hops: tuple[HopPlan, ...], memory: PredictedMemory, cluster: Cluster
) -> StepTime:
    """Predict the time of a step."""
    micro = spec.zero.accumulate
    units = sum(group.layers for group in spec.unit_groups) or 1
    rate = cluster.memory_rate
    kept = _TIMES_KEPT / 2 * work.kept / rate  # half of them in each pass
    forward, backward = _matmuls(spec, work, cluster)
    compute = {"forward": micro * (forward + kept), "backward": micro * (backward + kept)}
    compute |= {"passes": 0.0, "alone": 0.0}
    local, node = dict.fromkeys(compute, 0.0), dict.fromkeys(compute, 0.0)
    for hop in hops:
        if hop.usual:
            seconds = hop_seconds(hop, cluster)
            local[hop.when] += seconds.local
            node[hop.when] += seconds.node
            compute[hop.when] += hop.codec_bytes / rate
    masters, state = memory.wherever("parameters"), memory.wherever("optimizer")
    optimizer = (2 * (masters + state) + _TIMES_GRADIENTS * masters) / rate
    inside = optimizer * updated_in_backward(spec)
    alone = compute["passes"] + compute["alone"] + local["alone"] + node["alone"]

    kernels: dict[Part, float] = {"forward": 0.0, "backward": inside}

    def step(host: dict[Part, float]) -> float:
        passes = sum(
            local[part] + _overlapped(units, compute[part] + own, node[part], host[part])
            for part, own in kernels.items()
        )
        update = _overlapped(units, optimizer - inside, host["update"] + host["exchange"])
        return alone + update + max(passes, node["passes"])

    host = _copies(spec, memory, cluster)
    seconds = step(host)
    copying = seconds - step(dict.fromkeys(host, 0.0))
    return StepTime(
        sum(compute.values()),
        sum(local.values()),
        sum(node.values()),
        optimizer,
        seconds,
        sum(host.values()),
        copying,
    )


def _overlapped(units: int, *seconds: float) -> float:
    """Seconds of activities at the same time, each one unit ahead of or behind another."""
    longest = max(seconds)
    return longest + (sum(seconds) - longest) / units


def _copies(spec: TrainSpec, memory: PredictedMemory, cluster: Cluster) -> dict[Part, float]:
    """Seconds of the copies from and to host memory in each part of a step."""
    arriving, leaving = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for stream in host_streams(spec):
        held = sum(memory.host.get(kind, 0) for kind in stream.kinds)
        arriving[stream.part] += stream.arrives * held
        leaving[stream.part] += stream.leaves * held
    return {part: cluster.host_seconds(arriving[part], leaving[part]) for part in arriving}


def _matmuls(spec: TrainSpec, work: Work, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the FLOPs of one micro-batch, forward and backward."""
    dtype = spec.zero.compute_dtype
    rate = cluster.flops(dtype)
    slower = (1 / CUDNN_EFFICIENCY - 1) / rate
    share = share_of(spec, lambda leaf: leaf.fp8)
    # The product for a weight's gradient takes as long as the forward pass's. Frozen weights have none.
    spared = work.weights_forward * share_of(spec, lambda leaf: leaf.frozen)
    # The product for the gradient of an expert's matrix is not in fp8.
    exact = work.weights_forward * share_of(spec, lambda leaf: leaf.fp8 and len(leaf.shape) > 2)
    gained = 1 / rate - 1 / cluster.fp8_flops(dtype)
    read = share * _FP8_READ * work.read / cluster.memory_rate
    made = share * _FP8_MADE * work.made / cluster.memory_rate
    # The weight's gradient reads once more, and so does a recomputed forward pass.
    again = work.weights_backward / work.weights_forward - 1
    return (
        work.forward / rate + work.cudnn_forward * slower - work.weights_forward * share * gained + read,
        (work.backward - spared) / rate
        + work.cudnn_backward * slower
        - (work.weights_backward * share - exact) * gained
        + again * read
        + made,
    )
