#!/usr/bin/env python3
"""Time training steps over link rates, models and batches, between emulated nodes of this machine.

    scripts/bench_links.py --nodes 2 --gpus-per-node 1 --json links.json
    scripts/draw_links.py links.json --picture links.png

Each model and batch is one run of scripts/bench_train.py in a cluster of its own; the rates change beneath
its steps. Results are written after each, so that what is done is not lost with what is not. Needs root.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from zerojax.cluster import ClusterError, EmulatedCluster
from zerojax.cluster.network import bytes_per_second

BENCH_TRAIN = Path(__file__).with_name("bench_train.py")
MODELS = {
    "350M": ["--layers", "24", "--d-model", "1024"],
    "1.3B": ["--layers", "24", "--d-model", "2048"],
    "7B": ["--layers", "32", "--d-model", "4096", "--ffn", "11008", "--llama"],
}
TOKENS = (512, 1024, 2048, 8192)
LONGEST = 2048


def main() -> int:
    """Run every model with every batch; the exit code is the worst of the runs'."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, required=True)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=TOKENS, help=f"of a GPU; sequences of {LONGEST}"
    )
    parser.add_argument("--rates", nargs="+", default=["10gbit", "25gbit", "40gbit", "1000gbit"])
    parser.add_argument("--variants", nargs="+", default=["zero++", "delta"])
    parser.add_argument("--layers", type=int, help="of each model, to try this script out")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a model and batch")
    parser.add_argument("--json", type=Path, required=True, help="write what was measured here")
    options = parser.parse_args()
    cells: list[dict[str, Any]] = []
    worst = 0
    for model in options.models:
        for tokens in options.tokens:
            print(f"{model}, {tokens} tokens a GPU", flush=True)
            code, rows = run(model, tokens, options)
            worst = max(worst, code)
            cells += [{"model": model, "tokens": tokens, **row} for row in rows]
            options.json.write_text(json.dumps(cells, indent=1))
    return worst


def run(model: str, tokens: int, options: argparse.Namespace) -> tuple[int, list[dict[str, Any]]]:
    """One cell's exit code, and its rows as bench_train writes them (none if it failed)."""
    length = min(tokens, LONGEST)
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.json"
        command = [
            *(sys.executable, str(BENCH_TRAIN), "--no-trace", "--json", str(rows)),
            *("--nodes", str(options.nodes), "--local", str(options.gpus_per_node)),
            *("--seq", str(length), "--sequences", str(tokens // length), *MODELS[model]),
            *("--steps", str(options.steps), "--variants", *options.variants, "--rates", *options.rates),
        ]
        if options.layers:
            command += ["--layers", str(options.layers)]
        fastest = max(options.rates, key=bytes_per_second)
        try:
            with EmulatedCluster(options.nodes, options.gpus_per_node, rate=fastest) as cluster:
                code = cluster.run(command, timeout=options.timeout).code
        except (ValueError, ClusterError) as error:
            raise SystemExit(f"bench_links: {error}") from error
        except TimeoutError as error:
            print(f"bench_links: {error}", file=sys.stderr)
            return 1, []
        return code, json.loads(rows.read_text()) if code == 0 else []


if __name__ == "__main__":
    raise SystemExit(main())
