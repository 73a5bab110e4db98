#!/usr/bin/env python3
"""Time training steps over link rates, models and batches, between emulated nodes of this machine.

    scripts/bench/links.py --nodes 2 --gpus-per-node 1 --json links.json
    scripts/bench/show_links.py --nodes 2 --gpus-per-node 1 links.json --picture links.png

Each model and batch is one run of scripts/bench/train.py in a separate cluster, which measures all rates.
Results are written after each run, so that a failure loses only one. Needs root.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness

from zerojax.testing.emulated_cluster import ClusterError, EmulatedCluster
from zerojax.validation.rates import bytes_per_second

BENCH_TRAIN = Path(__file__).with_name("train.py")
MODELS = {
    "350M": ["--layers", "24", "--d-model", "1024"],
    "1.3B": ["--layers", "24", "--d-model", "2048"],
    "7B": ["--layers", "32", "--d-model", "4096", "--ffn", "11008", "--llama"],
}
TOKENS = (512, 1024, 2048, 8192)
MAX_LENGTH = 2048


def main() -> int:
    """Run every model with every batch; the exit code is the worst of the runs'."""
    parser = harness.parser(__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS, help="per GPU and step")
    parser.add_argument("--rates", nargs="+", default=["10gbit", "25gbit", "40gbit", "1000gbit"])
    parser.add_argument("--variants", nargs="+", default=["zero++", "delta"])
    parser.add_argument("--layers", type=int, help="of each model, for a quick trial")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a model and batch")
    parser.add_argument("--json", type=Path, required=True, help="write the results here")
    options = parser.parse_args()
    try:
        fastest = max(options.rates, key=bytes_per_second)
        batches = {tokens: in_sequences(tokens) for tokens in options.tokens}
    except ValueError as error:
        parser.error(str(error))
    cells: list[dict[str, Any]] = []
    worst = 0
    for model in options.models:
        for tokens, batch in batches.items():
            print(f"{model}, {tokens} tokens a GPU", flush=True)
            code, rows = run(model, batch, fastest, options)
            worst = max(worst, code)
            cells += [{"model": model, "tokens": tokens, **row} for row in rows]
            options.json.write_text(json.dumps(cells, indent=1))
    return worst


def in_sequences(tokens: int) -> tuple[int, int]:
    """The number and length of sequences for a number of tokens: a single one, or some of `MAX_LENGTH`.

    Raises:
        ValueError: the tokens do not divide so.
    """
    length = min(tokens, MAX_LENGTH)
    if tokens < 1 or tokens % length:
        raise ValueError(f"{tokens} tokens do not divide into sequences of {MAX_LENGTH}")
    return tokens // length, length


def run(
    model: str, batch: tuple[int, int], fastest: str, options: argparse.Namespace
) -> tuple[int, list[dict[str, Any]]]:
    """One cell's exit code, and its rows as train.py writes them (none if it failed)."""
    sequences, length = batch
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [
            *(sys.executable, str(BENCH_TRAIN), "--no-trace", "--json", str(rows)),
            *("--nodes", str(options.nodes), "--local", str(options.gpus_per_node)),
            *("--seq", str(length), "--sequences", str(sequences), *MODELS[model]),
            *("--steps", str(options.steps), "--variants", *options.variants, "--rates", *options.rates),
        ]
        if options.layers:
            command += ["--layers", str(options.layers)]
        try:
            with EmulatedCluster(options.nodes, options.gpus_per_node, rate=fastest) as cluster:
                code = cluster.run(command, timeout=options.timeout).code
        except (ValueError, ClusterError) as error:
            raise SystemExit(f"links: {error}") from error
        except TimeoutError as error:
            print(f"links: {error}", file=sys.stderr)
            return 1, []
        return code, json.loads(rows.read_text()) if code == 0 else []


if __name__ == "__main__":
    raise SystemExit(main())
