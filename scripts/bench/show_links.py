#!/usr/bin/env python3
"""Show the results of scripts/bench/links.py and the planner's predictions as a Markdown table.

scripts/bench/show_links.py --nodes 2 --gpus-per-node 1 links.json more.json

Cells are thousands of tokens/s of one GPU, by the median step, and in brackets the planner's prediction. A
rate above 400 Gb/s means no limit, and is predicted as 400. Below the table: how many are within 15%.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import harness

os.environ["JAX_PLATFORMS"] = "cpu"  # it computes shapes only
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import optax
import train
from links import MODELS, in_sequences
from rows import add_model_options

import zerojax
from zerojax.analysis.gpus import find_gpu
from zerojax.analysis.plan.cluster import NETWORK_EFFICIENCY, Cluster, on_world
from zerojax.analysis.plan.hops import hops_of
from zerojax.analysis.plan.memory import predict_memory
from zerojax.analysis.plan.speed import predict_step
from zerojax.analysis.plan.work import decoder_work
from zerojax.models import GPTConfig
from zerojax.sharding.mesh import MeshShape
from zerojax.train.spec import TrainSpec
from zerojax.validation.rates import bytes_per_second

UNTHROTTLED = bytes_per_second("400gbit")
Cells = dict[tuple[str, int, str, str], tuple[float, float | None]]
"""(model, tokens, rate, variant) -> tokens/s of one GPU: measured, and predicted if the planner knows it."""


def main() -> None:
    """Print the table, draw the picture."""
    parser = harness.parser(__doc__)
    parser.add_argument("results", nargs="+", type=Path, help="what links.py wrote")
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument(
        "--flows", help="payload that NCCL's TCP flows carried, where a link's rate is more: 19.7gbit"
    )
    options = parser.parse_args()
    world = options.nodes * options.gpus_per_node
    most = UNTHROTTLED
    if options.flows:
        most = min(most, bytes_per_second(options.flows) / NETWORK_EFFICIENCY)
    cells: Cells = {}
    for cell in (cell for path in options.results for cell in json.loads(path.read_text())):
        model, tokens, rate, variant = (cell[key] for key in ("model", "tokens", "rate", "variant"))
        cluster = Cluster(
            options.nodes,
            options.gpus_per_node,
            find_gpu(options.gpu),
            min(bytes_per_second(rate), most),
        )
        expected = None
        with suppress(argparse.ArgumentTypeError):  # another system
            expected = predict(model, tokens, variant, cluster)
        cells[model, tokens, rate, variant] = cell["tokens_per_second"] / world, expected
    print(table(cells), *within(cells), sep="\n")


def within(cells: Cells, share: float = 0.15) -> Iterator[str]:
    """For each rate, how many predicted cells are near the measured ones."""
    for rate in names(cells, 2):
        found = [
            abs(measured / expected - 1) <= share
            for (_, _, at, _), (measured, expected) in cells.items()
            if at == rate and expected is not None
        ]
        yield f"{in_words(rate)}: {sum(found)} of {len(found)} within {share:.0%} of the prediction"


def predict(model: str, tokens: int, variant: str, cluster: Cluster) -> float:
    """Tokens/s of one GPU by the planner."""
    sequences, length = in_sequences(tokens)
    config, spec = abstract(model, length)
    fields = train.options_of(variant)
    zero = zerojax.ZeroConfig.preset(fields.pop("preset"), remat="full", **fields)
    there = on_world(spec, MeshShape(cluster.nodes, cluster.local), zero)
    work = decoder_work(
        config, remat="full", dtype="bfloat16", sequences=sequences, length=length, head=False
    )
    memory = predict_memory(there, work, workspace=cluster.gpu.workspace)
    return tokens * zero.accumulate / predict_step(there, work, hops_of(there), memory, cluster).seconds


@cache
def abstract(model: str, length: int) -> tuple[GPTConfig, TrainSpec]:
    """A model of links.py, and its abstract program on two devices."""
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    config = train.make_config(parser.parse_args([*MODELS[model], "--seq", str(length)]))
    state = zerojax.TrainState.abstract(
        lambda rngs: train.BlockStack(config, rngs=rngs),
        optax.adamw(1e-4),
        train.loss_fn,
        mesh=zerojax.make_mesh(2, 1),
    )
    return config, state.spec


def names(cells: Cells, field: int) -> list[Any]:
    """The values of one coordinate of the cells, in order of appearance."""
    return list(dict.fromkeys(key[field] for key in cells))


def table(cells: Cells) -> str:
    """A row for each model and batch, a column for each rate and variant."""
    columns = [(rate, variant) for rate in names(cells, 2) for variant in names(cells, 3)]
    titles = (f"{variant}, {in_words(rate)}" for rate, variant in columns)
    lines = harness.heads("model", "tokens", *titles)
    for model in names(cells, 0):
        for tokens in names(cells, 1):
            found = (cells.get((model, tokens, *column)) for column in columns)
            lines.append(harness.cells(model, tokens, *map(in_thousands, found)))
    return "\n".join(lines)


def in_thousands(cell: tuple[float, float | None] | None) -> str:
    """A cell of the table."""
    if cell is None:
        return "-"
    measured, expected = cell
    return f"{measured / 1e3:.3g}" + ("" if expected is None else f" ({expected / 1e3:.3g})")


def in_words(rate: str) -> str:
    """A rate as a heading."""
    if bytes_per_second(rate) > UNTHROTTLED:
        return "no limit"
    return f"{bytes_per_second(rate) * 8 / 1e9:g} Gb/s"


if __name__ == "__main__":
    main()
