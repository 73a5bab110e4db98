"""An outlook as a picture: memory by kind and a step's time by part, for each way of sharding."""

from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zerojax.analysis.plan.memory import KINDS
from zerojax.analysis.plan.outlook import Outlook
from zerojax.errors import ConfigurationError, file_errors

# First the ten dark colours, then their light counterparts. There are more colours than kinds of memory.
_COLOURS = [colormaps["tab20"](i) for i in (*range(0, 20, 2), *range(1, 20, 2))]

_ALWAYS = ("compute", "hops in the node", "waiting for the network", "optimizer")


def draw_outlook(outlook: Outlook, path: Path, title: str) -> None:
    """Draw an outlook as PNG.

    Raises:
        ConfigurationError: the file cannot be written, or its suffix is no format of pictures.
    """
    cluster = outlook.cluster
    figure = Figure(figsize=(12, 1.9 + 0.5 * len(outlook.forecasts)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    _draw_memory(outlook, memory)
    _draw_time(outlook, time)
    figure.suptitle(
        f"{title}: predicted for {cluster.nodes} x {cluster.local} {cluster.gpu.kind}, "
        f"{outlook.sequences} x {outlook.zero.accumulate} sequences of {outlook.length} tokens a device"
    )
    with file_errors(path, what="cannot write: "):
        try:
            figure.savefig(path, dpi=120)
        except ValueError as error:  # matplotlib does not know the suffix
            raise ConfigurationError(f"{path}: {error}") from error


def _draw_memory(outlook: Outlook, axes: Axes) -> None:
    kinds = [k for k in KINDS if any(f.memory.kinds[k] > 0.002 * f.memory.total for f in outlook.forecasts)]
    parts = {kind: [f.memory.kinds[kind] / 1e9 for f in outlook.forecasts] for kind in kinds}
    ends = _stack(axes, outlook, parts)
    axes.axvline(outlook.cluster.budget / 1e9, color="black", ls="--", lw=1)
    axes.annotate(
        "for arrays",
        (outlook.cluster.budget / 1e9, 1),
        xycoords=("data", "axes fraction"),
        ha="center",
        va="bottom",
    )
    axes.set_xlim(0, 1.15 * max(*ends, outlook.cluster.budget / 1e9))
    axes.set_xlabel("memory of one GPU, GB")


def _draw_time(outlook: Outlook, axes: Axes) -> None:
    times = [forecast.time for forecast in outlook.forecasts]
    parts = {
        "compute": [1e3 * t.compute for t in times],
        "hops in the node": [1e3 * t.local for t in times],
        "waiting for the network": [1e3 * t.waiting for t in times],
        "optimizer": [1e3 * t.optimizer for t in times],
        "copies from and to the host": [1e3 * t.copying for t in times],
    }
    parts = {name: widths for name, widths in parts.items() if name in _ALWAYS or any(widths)}
    ends = _stack(axes, outlook, parts)
    for row, (end, forecast) in enumerate(zip(ends, outlook.forecasts, strict=True)):
        axes.annotate(
            f" {end:,.0f} ms, MFU {forecast.mfu:.0%}" + ("" if forecast.fits else ", too large"),
            (end, row),
            va="center",
        )
    axes.set_xlim(0, 1.4 * max(ends))
    axes.set_xlabel("step, ms")


def _stack(axes: Axes, outlook: Outlook, parts: dict[str, list[float]]) -> list[float]:
    """Draw a bar of stacked parts for each forecast, and return the ends of the bars."""
    names = [forecast.name for forecast in outlook.forecasts]
    ends = [0.0] * len(names)
    for colour, (label, widths) in zip(_COLOURS, parts.items(), strict=False):
        axes.barh(names, widths, left=ends, height=0.65, label=label, color=colour)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.legend(fontsize="small", ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.18))
    return ends
