"""An outlook as tables."""

from rich.console import Group as Rows
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from zerojax.analysis.gpus import BOTH_WAYS
from zerojax.analysis.link_report import OPS, gigabits
from zerojax.analysis.plan.choices import host_needed
from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.hops import hops_table, usual_bytes
from zerojax.analysis.plan.outlook import LONGEST, Forecast, Outlook
from zerojax.analysis.plan.speed import hop_seconds
from zerojax.formatting import milliseconds, numeric, size

# Bytes/s (docs/clusters.md).
_TCP = 60e9 / 8


def outlook_tables(outlook: Outlook) -> RenderableType:
    """Assumptions, memory and hops with the config's own options, all forecasts side by side, and advice."""
    more = [Text(line) for line in (outlook.remat, outlook.spread) if line is not None]
    more += [] if outlook.host is None else [Text(outlook.host.advice)]
    more += [] if outlook.longest is None else [Text(_longest(outlook, outlook.longest))]
    title = f"What one device sends per step, {outlook.own.name}"
    hops = hops_table(outlook.own.hops, title, lambda hop: hop_seconds(hop, outlook.cluster))
    tables = _memory(outlook), hops, _side_by_side(outlook)
    return Rows(*assumptions(outlook), *tables, outlook.advice, *more)


def _longest(outlook: Outlook, tokens: int) -> str:
    """A sentence about the longest sequences that fit."""
    many = f"{outlook.sequences} of them" if outlook.sequences > 1 else "one of them"
    sharing = outlook.zero.sequence_parallel
    where = "a device" if sharing == 1 else f"{sharing} devices that share it"
    if not tokens:
        return f"No sequence of at least 1,024 tokens a device fits, {many} at a time."
    if tokens < LONGEST * sharing:
        return f"The longest sequences that fit have {tokens:,} tokens, {many} on {where} in a micro-batch."
    return f"Sequences of at least {tokens:,} tokens fit, {many} on {where} in a micro-batch."


def assumptions(outlook: Outlook) -> list[str]:
    """The assumptions of the prediction, one per line."""
    cluster, gpu = outlook.cluster, outlook.cluster.gpu
    origin = "measured on this GPU" if gpu.measured else "measured on H200, assumed here"
    network = ""
    if cluster.nodes > 1:
        network = f", {_network(cluster)} between nodes"
    zero, sharing = outlook.zero, outlook.zero.sequence_parallel
    whose = "device" if sharing == 1 else f"{sharing}-device group"
    lines = [
        "A prediction: nothing was run.",
        f"- {cluster.nodes} x {cluster.local} {gpu.kind}{network}",
        f"- sequences of {outlook.length} tokens: {outlook.sequences} a {whose} and micro-batch x "
        f"{zero.accumulate} micro-batches x {cluster.world.size // sharing} {whose}s = "
        f"{outlook.batch} a step",
        f"- matmuls at {cluster.efficiency:.0%} of {gpu.flops / 1e12:g} TFLOP/s ({origin}), "
        f"{cluster.link_rate / 1e9:.0f} GB/s within a node",
        f"- {size(cluster.budget)} of {size(gpu.memory)} for arrays "
        f"(XLA_CLIENT_MEM_FRACTION={cluster.memory_fraction:g})",
    ]
    if outlook.own.memory.host:
        rate = cluster.host_rate / 1e9
        there = "" if cluster.host_memory is None else f" of {size(cluster.host_memory)}"
        needed = f"{size(host_needed(outlook.own.memory, cluster))}{there} in the memory of a host"
        lines.append(
            f"- {needed}; {rate:.0f} GB/s between it and a GPU, {BOTH_WAYS * rate:.0f} each way at once"
        )
    fp8 = zero.matmul_dtype == "fp8"
    if fp8 and gpu.fp8_flops:
        reached = f"{cluster.fp8_flops('bfloat16') / 1e12:.0f} of {gpu.fp8_flops / 1e12:g} TFLOP/s"
        lines.append(f"- matmuls with weights in fp8, at {reached} and conversions; below stage 3 in bf16")
    elif fp8:
        lines.append(f"- {gpu.kind} has no fp8 matmuls: their emulation is slower than predicted here")
    if cluster.nodes > 1 and cluster.links is None and cluster.bandwidth > _TCP:
        carried = f"NCCL's collectives carried {gigabits(_TCP)} Gb/s between nodes of one GPU"
        lines.append(f"- a network with RDMA: over TCP {carried} (measure with zerojax links, pass --links)")
    return lines


def _network(cluster: Cluster) -> str:
    links = cluster.links
    if links is None:
        return f"{8 * cluster.bandwidth / 1e9:g} Gb/s"
    rates = ", ".join(f"{op} {gigabits(links.expected(op).rate)}" for op in OPS)
    source = "TCP flows" if links.platform == "cpu" else "collectives"
    return f"{rates} Gb/s ({source} measured on {links.nodes} x {links.local} devices)"


def _memory(outlook: Outlook) -> Table:
    own = outlook.own
    verdict = "fits" if own.fits else "does not fit"
    title = f"Memory of one device, {own.name}: {verdict}"
    return own.memory.table(title, of=f"of {size(outlook.cluster.budget)}")


def _side_by_side(outlook: Outlook) -> Table:
    on_host = any(forecast.memory.host for forecast in outlook.forecasts)
    table = Table(
        "",
        *numeric("memory", "sent", "compute", "local", "network", "waiting", *["copying"] * on_host, "step"),
        *numeric("tokens/s", "MFU", "largest", "nodes"),
        title="Predicted steps, ms",
        caption="sent: between nodes, by a node. "
        "compute, local, network and optimizer overlap; waiting: what the network adds to the step. "
        + "copying: what copies from and to host memory add. " * on_host
        + "largest: sequences a device that fit. nodes: the fewest that fit",
    )
    for forecast in outlook.forecasts:
        row = _row(forecast, outlook.cluster, on_host=on_host)
        table.add_row(*row, style=None if forecast.fits else "dim")
    return table


def _row(forecast: Forecast, cluster: Cluster, *, on_host: bool) -> list[str]:
    time = forecast.time
    memory = size(forecast.memory.total)
    speed = [f"{forecast.tokens_per_second:,.0f}", f"{forecast.mfu:.1%}"]
    copying = [time.copying] * on_host
    parts = (time.compute + time.optimizer, time.local, time.node, time.waiting, *copying, time.seconds)
    nodes = str(forecast.fewest_nodes) if forecast.fewest_nodes else "-"
    return [
        forecast.name,
        memory if forecast.fits else f"{memory}: too much",
        size(usual_bytes(forecast.hops).node * cluster.local),
        *map(milliseconds, parts),
        *speed,
        str(forecast.largest),
        nodes,
    ]
