"""An outlook as tables."""

from rich.console import Group as Rows
from rich.console import RenderableType
from rich.table import Table

from zerojax.plan.hops import usual_bytes
from zerojax.plan.memory import KINDS
from zerojax.plan.outlook import Forecast, Outlook
from zerojax.plan.speed import hop_seconds
from zerojax.report import size


def outlook_tables(outlook: Outlook) -> RenderableType:
    """Assumptions, memory and hops of the config's own settings, all settings side by side, the advice."""
    return Rows(
        *assumptions(outlook), _memory(outlook), _hops(outlook), _side_by_side(outlook), outlook.advice
    )


def assumptions(outlook: Outlook) -> list[str]:
    """What the prediction takes for granted, a line each."""
    cluster, gpu = outlook.cluster, outlook.cluster.gpu
    origin = "measured on this GPU" if gpu.measured else "measured on H200, assumed here"
    network = ""
    if cluster.nodes > 1:
        network = f", {8 * cluster.bandwidth / 1e9:g} Gb/s between nodes"
    return [
        "A prediction: nothing was run.",
        f"- {cluster.nodes} x {cluster.local} {gpu.kind}{network}",
        f"- sequences of {outlook.length} tokens: {outlook.sequences} a device and micro-batch x "
        f"{outlook.accumulate} micro-batches x {cluster.world.size} devices = {outlook.batch} a step",
        f"- matmuls at {cluster.efficiency:.0%} of {gpu.flops / 1e12:g} TFLOP/s ({origin}), "
        f"{cluster.link_rate / 1e9:.0f} GB/s within a node",
        f"- {size(cluster.budget)} of {size(gpu.memory)} for arrays "
        f"(XLA_CLIENT_MEM_FRACTION={cluster.memory_fraction:g})",
    ]


def milliseconds(seconds: float) -> str:
    """0.01234 -> "12.3"."""
    return f"{1e3 * seconds:,.1f}"


def _memory(outlook: Outlook) -> Table:
    own = outlook.own
    verdict = "fits" if own.fits else "does not fit"
    table = Table(title=f"Memory of one device, {own.name}: {verdict}")
    table.add_column("kind")
    table.add_column("what it is")
    table.add_column("bytes", justify="right")
    for kind, count in own.memory.kinds.items():
        if count:
            table.add_row(kind, KINDS[kind], size(count))
    table.add_section()
    table.add_row("total", f"of {size(outlook.cluster.budget)}", size(own.memory.total))
    return table


def _hops(outlook: Outlook) -> Table:
    own = outlook.own
    table = Table(title=f"What one device sends per step, {own.name}")
    for name in ("phase", "over", "formats"):
        table.add_column(name)
    for name in ("in the node", "ms", "between nodes", "ms"):
        table.add_column(name, justify="right")
    totals = [0.0, 0.0]
    for hop in own.hops:
        local, node = hop_seconds(hop, outlook.cluster)
        cells = [size(hop.local_bytes), milliseconds(local), size(hop.node_bytes), milliseconds(node)]
        if hop.usual:
            totals = [totals[0] + local, totals[1] + node]
        else:
            cells = [f"({cell})" for cell in cells]
        table.add_row(hop.phase, hop.axis, ", ".join(hop.formats), *cells)
    table.add_section()
    local_bytes, node_bytes = usual_bytes(own.hops)
    sums = [size(local_bytes), milliseconds(totals[0]), size(node_bytes), milliseconds(totals[1])]
    table.add_row("total", "", "", *sums)
    if not all(hop.usual for hop in own.hops):
        table.caption = "(in parentheses: not in every step, and in no total)"
    return table


def _side_by_side(outlook: Outlook) -> Table:
    table = Table(
        title="Predicted steps, ms",
        caption="compute, local, network and optimizer overlap; waiting: what the network adds to the step. "
        "largest: sequences a device that fit. nodes: the fewest that fit",
    )
    table.add_column("")
    headings = (
        "memory",
        "compute",
        "local",
        "network",
        "waiting",
        "step",
        "tokens/s",
        "MFU",
        "largest",
        "nodes",
    )
    for name in headings:
        table.add_column(name, justify="right")
    for forecast in outlook.forecasts:
        table.add_row(*_row(forecast), style=None if forecast.fits else "dim")
    return table


def _row(forecast: Forecast) -> list[str]:
    time = forecast.time
    memory = size(forecast.memory.total)
    speed = [f"{forecast.tokens_per_second:,.0f}", f"{forecast.mfu:.1%}"]
    parts = (time.compute + time.optimizer, time.local, time.node, time.waiting, time.seconds)
    nodes = str(forecast.fewest_nodes) if forecast.fewest_nodes else "-"
    return [
        forecast.name,
        memory if forecast.fits else f"{memory}: too much",
        *map(milliseconds, parts),
        *speed,
        str(forecast.largest),
        nodes,
    ]
