#!/usr/bin/env python3
"""Draw the --json output of the benchmarks: a step's time under each system, a panel per link rate.

scripts/bench/draw_rows.py docs/measured/2x4-10gbit.json --picture docs/peers.png
"""

import json
from pathlib import Path

import harness
from rows import Row

OURS = ("zero3", "qwz", "hpz", "qgz", "zero++", "delta")


def main() -> None:
    """Read the rows, draw them."""
    parser = harness.parser(__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="outputs of the benchmarks of one session")
    parser.add_argument("--picture", type=Path, required=True, help="the PNG to write")
    options = parser.parse_args()
    draw([Row(**row) for path in options.results for row in json.loads(path.read_text())], options.picture)


def draw(rows: list[Row], path: Path) -> None:
    """Bars to the median, a line from minimum to maximum, and the ratio to the fastest median."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(row.rate for row in rows))
    bars = max(sum(row.rate == rate for row in rows) for rate in rates)
    figure = Figure(figsize=(2 + 3.2 * len(rates), 0.8 + 0.34 * bars), layout="constrained")
    for axes, rate in zip(figure.subplots(1, len(rates), squeeze=False)[0], rates, strict=True):
        shown = sorted((row for row in rows if row.rate == rate), key=lambda row: row.milliseconds)
        medians, least, most = zip(*(row.milliseconds for row in shown), strict=True)
        around = [
            [median - low for median, low in zip(medians, least, strict=True)],
            [high - median for median, high in zip(medians, most, strict=True)],
        ]
        colors = ["C0" if row.variant.split("-")[0] in OURS else "C7" for row in shown]
        names = [row.variant for row in shown]
        axes.barh(names, medians, xerr=around, color=colors, ecolor="black", capsize=2)
        for place, (median, high) in enumerate(zip(medians, most, strict=True)):
            factor = f", {median / medians[0]:.1f}x" if place else ""
            axes.text(high, place, f" {median:.0f} ms{factor}", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.55 * max(most))
        axes.set_xlabel("ms")
        if rate is not None:
            axes.set_title(rate, fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
