"""How long a step will take: a model of few figures, each measured or off a data sheet.

The parts, in seconds, of one device and step:

- compute: FLOPs executed, recomputed ones counted, over what matmuls reach; and, over what memory reaches,
  the bytes that codecs read and write, and kept activations four times (into the stack of all layers, and out
  of it again: each a read and a write).
- local and node: bytes of the hops over the rates of their links.
- optimizer: its state and the parameters read and written once, gradients four times read or written (their
  norm, their mean, the update), over what memory reaches.

How they overlap: in each pass, of u units, hops between nodes run beside compute, one unit ahead or behind,

    pass = local + max(compute, node) + min(compute, node) / u

while hops within a node are counted as hidden behind neither: they run beside the matmuls but take
multiprocessors and memory from them. What is done once per step has nothing beside it: the gather of
stages 1 and 2, delta's where the step has several micro-batches, a reduction after the last of them, the
optimizer.

Latencies, stragglers and input are not in it: units should have some megabytes.
"""

from dataclasses import asdict, dataclass

from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.hops import HopPlan
from zerojax.analysis.plan.memory import PredictedMemory
from zerojax.analysis.plan.work import Work
from zerojax.train.spec import Program

_TIMES_KEPT = 4
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
    """

    compute: float
    local: float
    node: float
    optimizer: float
    seconds: float

    @property
    def waiting(self) -> float:
        """What the step spends on the network alone."""
        return max(0.0, self.seconds - self.compute - self.local - self.optimizer)

    def to_dict(self) -> dict[str, float]:
        """As plain data."""
        return asdict(self) | {"waiting": self.waiting}


def hop_seconds(hop: HopPlan, cluster: Cluster) -> tuple[float, float]:
    """Seconds that a hop takes within the node, and between nodes."""
    node = hop.node_bytes * cluster.local / cluster.network_rate if hop.node_bytes else 0.0
    return hop.local_bytes / cluster.link_rate, node


def predict_step(
    program: Program, work: Work, hops: tuple[HopPlan, ...], memory: PredictedMemory, cluster: Cluster
) -> StepTime:
    """The time of a step.

    Args:
        program: what is trained, laid out on the cluster.
        work: of one micro-batch.
        hops: of the program.
        memory: of the program; its lasting part is what the optimizer goes through.
        cluster: where.
    """
    micro = program.zero.accumulate
    units = sum(group.layers or 1 for group in program.groups if group.unit is not None) or 1
    dtype, rate = program.zero.compute_dtype, cluster.memory_rate
    kept = _TIMES_KEPT / 2 * work.kept / rate  # half of it in each pass
    compute = {
        "forward": micro * (work.forward / cluster.flops(dtype) + kept),
        "backward": micro * (work.backward / cluster.flops(dtype) + kept),
        "alone": 0.0,
    }
    local, node = dict.fromkeys(compute, 0.0), dict.fromkeys(compute, 0.0)
    for hop in hops:
        if hop.usual:
            part = _part_of(hop, program)
            within, between = hop_seconds(hop, cluster)
            local[part] += within
            node[part] += between
            compute[part] += hop.codec_bytes / rate
    optimizer = _optimizer_bytes(program, memory) / rate
    seconds = optimizer + compute["alone"] + local["alone"] + node["alone"]
    for part in ("forward", "backward"):
        shorter, longer = sorted((compute[part], node[part]))
        seconds += local[part] + longer + shorter / units
    return StepTime(sum(compute.values()), sum(local.values()), sum(node.values()), optimizer, seconds)


def _part_of(hop: HopPlan, program: Program) -> str:
    """The pass beside which a hop runs, or "alone"."""
    if hop.phase == "delta":
        return "forward" if program.updating else "alone"
    if hop.phase == "weights forward" and program.zero.stage < 3:
        return "alone"
    if hop.phase == "gradients":
        last = program.route.sink == "full" or (program.route.sink == "secondary" and hop.axis == "node")
        return "alone" if last else "backward"
    return "forward" if hop.phase == "weights forward" else "backward"


def _optimizer_bytes(program: Program, memory: PredictedMemory) -> int:
    parameters, state = memory.kinds["parameters"], memory.kinds["optimizer"]
    return 2 * (parameters + state) + _TIMES_GRADIENTS * parameters
