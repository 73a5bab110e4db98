#!/usr/bin/env python3
"""Predict the speed of zerojax over link rates, models and batches with the planner; nothing is run.

    scripts/bench/expected_speed.py --nodes 2 --gpus-per-node 4 --gpu h200 --picture docs/expected.png

Prints Markdown: thousands of tokens/s of one GPU under zero3 / zero++ / delta / local, recomputing everything
(`remat="full"`), with one micro-batch per step. More than 2048 tokens are sequences of 2048.
"""

import dataclasses
from pathlib import Path

import harness
from links import TOKENS, in_sequences

from zerojax.analysis.gpus import find_gpu
from zerojax.analysis.plan.cluster import Cluster
from zerojax.analysis.plan.outlook import COMPARED, Outlook, foresee
from zerojax.cli.trained import abstract_run
from zerojax.run.config import MeshSection, find_config, load_config
from zerojax.validation.rates import bytes_per_second

MODELS = ("gpt-350m", "gpt-1.3b", "llama-7b")
GIGABITS = (10, 25, 40, 400)

Rates = dict[tuple[int, int], dict[str, float]]
"""(Gb/s, tokens a GPU) -> preset -> tokens/s of one GPU; without those whose memory does not suffice."""


def main() -> None:
    """Print the table, draw the picture."""
    parser = harness.parser(__doc__, nodes=2, gpus_per_node=4)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--picture", type=Path, help="draw the table into this PNG")
    options = parser.parse_args()
    shape = options.nodes, options.gpus_per_node, find_gpu(options.gpu)
    clusters = {gigabits: Cluster(*shape, bytes_per_second(f"{gigabits}gbit")) for gigabits in GIGABITS}
    harness.table("model", "tokens a GPU", *(f"{gigabits} Gb/s" for gigabits in GIGABITS))
    table = {}
    for model in MODELS:
        table[model] = expect(model, clusters)
        for tokens in TOKENS:
            cells = (table[model][gigabits, tokens] for gigabits in GIGABITS)
            harness.row(model, tokens, *map(in_words, cells))
    if options.picture:
        draw(table, f"{options.nodes} x {options.gpus_per_node} {options.gpu.upper()}", options.picture)


def expect(model: str, clusters: dict[int, Cluster]) -> Rates:
    """The predictions for one model on each cluster with each batch."""
    settings = load_config(find_config(model))
    settings = dataclasses.replace(
        settings,
        train=dataclasses.replace(settings.train, accumulate=1),
        zero=dataclasses.replace(settings.zero, remat="full"),
        mesh=MeshSection(nodes=2, local=1),  # the model's parameters do not depend on it
    )
    state, _ = abstract_run(settings)

    def outlook(cluster: Cluster, tokens: int) -> Outlook:
        sequences, length = in_sequences(tokens)
        return foresee(
            state.spec,
            settings.model,
            cluster,
            sequences=sequences,
            length=length,
            optimizer=settings.optimizer.name,
        )

    return {
        (gigabits, tokens): {
            forecast.name: forecast.tokens_per_second / cluster.world.size
            for forecast in outlook(cluster, tokens).forecasts
            if forecast.name in COMPARED and forecast.fits
        }
        for gigabits, cluster in clusters.items()
        for tokens in TOKENS
    }


def in_words(rates: dict[str, float]) -> str:
    """A cell of the table: thousands of tokens/s, each preset's."""
    return " / ".join(f"{rates[name] / 1e3:.3g}" if name in rates else "-" for name in COMPARED)


def draw(table: dict[str, Rates], title: str, path: Path) -> None:
    """Curves of every preset, a panel for each model and rate."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = Figure(figsize=(2.75 * len(GIGABITS), 2.35 * len(table)), layout="constrained")
    panels = figure.subplots(len(table), len(GIGABITS), sharex=True, sharey="row", squeeze=False)
    for row, (model, rates) in zip(panels, table.items(), strict=True):
        for axes, gigabits in zip(row, GIGABITS, strict=True):
            for name in COMPARED:
                known = {t: found for t in TOKENS if (found := rates[gigabits, t].get(name)) is not None}
                axes.plot(
                    list(known), [rate / 1e3 for rate in known.values()], "o-", markersize=4, label=name
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(TOKENS, [f"{t / 1024:g}k" for t in TOKENS])
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{model}, {gigabits} Gb/s", fontsize=9)
            axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("tokens of a GPU in a step", fontsize=10)
    figure.supylabel("thousands of tokens/s of a GPU", fontsize=10)
    figure.suptitle(f"Predicted for {title}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
