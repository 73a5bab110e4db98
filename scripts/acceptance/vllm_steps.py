#!/usr/bin/env python3
"""Time steps of GRPO with vLLM on another node: on the current policy, and one rollout ahead.

    sudo -E scripts/acceptance/vllm_steps.py --environment ~/vllm --rate 10gbit --seeds 3 --steps 24

The run and vLLM are two nodes of an emulated cluster, with a CPU core each. They learn the sums of
vllm_mirror.py, which also makes the environment. Before each rollout the changed weights go over the link to
a receiver beside vLLM. Prints a line of JSON for each run.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import vllm_mirror as mirror

from zerojax.multihost.peers.handshake import VARIABLE
from zerojax.run.metrics.files import read_metrics
from zerojax.testing.emulated_cluster import EmulatedCluster

UNTIMED = 4  # steps, while programs compile
NO_JOB = ("JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES")


def serve(python: Path, work: Path, address: str) -> None:
    """Run vLLM and a receiver beside it until the file "done" exists."""
    model = ["--model", "hf", "--max-model-len", mirror.ROOM, "--dtype", "float32"]
    server = ["-m", "vllm.entrypoints.openai.api_server", *model, "--host", address, "--port", mirror.PORT]
    source = mirror.ROOT / "zerojax/interop/engines"
    receiver = ["env", f"PYTHONPATH={source}", python, "-m", "receiver", "--mirror", "mirror"]
    every = [
        mirror.Killable([python, *server, *mirror.FLAGS], work, "vllm.log"),
        mirror.Killable([*receiver, "--listen", f"{address}:{port_of_receiver()}"], work, "receiver.log"),
    ]
    while not (work / "done").exists():
        time.sleep(0.2)
    for one in every:
        one.kill()


def port_of_receiver() -> int:
    """The port of vllm_mirror's receiver."""
    return int(mirror.RECEIVER.rpartition(":")[2])


def train(work: Path, address: str, batch: int, steps: int, seeds: int, hidden: int) -> None:
    """Train with each seed in both ways, and print the seconds of a step."""
    engine = f"http://{address}:{mirror.PORT}"
    wait_for(engine)
    settings = {
        "train.steps": steps,
        "train.batch-size": batch,
        "train.eval-every": 0,
        "checkpoint.every": steps,
        "mesh.local": 1,
        "model.heads": 2,
        "model.d-model": hidden,
        "optimizer.learning-rate": 1e-3,
        "data.tokenizer": "sums/data/tokenizer.json",
        "posttrain.reward": f"{mirror.ROOT / 'configs/arithmetic_reward.py'}:reward",
        "posttrain.eval-prompts": 0,
        "posttrain.engines": engine,
        "posttrain.engine-receivers": f"{address}:{port_of_receiver()}",
        "posttrain.engine-folder": work / "mirror",
    }
    given = [str(x) for name, value in settings.items() for x in (f"--{name}", value)]
    for seed in range(seeds):
        for ahead in (0, 1):
            options = [*given, "--posttrain.rollouts-ahead", str(ahead), "--train.seed", str(seed)]
            seconds = seconds_of_steps(work, f"run-{seed}-{ahead}", options)[UNTIMED:]
            found = {"seed": seed, "ahead": ahead, "steps": len(seconds)}
            found |= {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}
            print(json.dumps(found), flush=True)


def seconds_of_steps(work: Path, name: str, options: Sequence[str]) -> list[float]:
    """Seconds of each step of a run, by its metrics."""
    command = [*mirror.ZEROJAX, "posttrain", "arithmetic-grpo", "--init-from", "sums", "--run-dir", name]
    environment = {name: x for name, x in os.environ.items() if name not in NO_JOB} | mirror.VARIABLES
    with (work / f"{name}.log").open("wb") as log:
        whole = [*command, *options, *mirror.FAMILIES["llama"]]
        subprocess.run(whole, cwd=work, env=environment, check=True, stdout=log, stderr=log)
    return [line["step_seconds"] for line in read_metrics(work / name / "metrics.jsonl")]


def wait_for(engine: str) -> None:
    """Wait until vLLM responds."""
    for _ in range(600):
        with suppress(OSError):
            urllib.request.urlopen(f"{engine}/health", timeout=2)
            return
        time.sleep(1)
    raise SystemExit(f"{engine} does not respond")


def main() -> None:
    """Start both nodes; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"batch": 128, "steps": 24, "seeds": 3, "hidden": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--environment", type=Path, required=True, help="of vLLM; made if it is missing")
    parser.add_argument("--rate", default="10gbit", help="of the link")
    parser.add_argument("--role", nargs=3, help="used by the nodes")
    options = parser.parse_args()
    python = mirror.make_environment(options.environment.absolute())
    if options.role:
        node, work, address = int(options.role[0]), Path(options.role[1]), options.role[2]
        os.sched_setaffinity(0, {node})
        mirror.VARIABLES[VARIABLE] = os.environ[VARIABLE]  # the cluster's, which both nodes have
        if node:
            return serve(python, work, address)
        try:
            return train(work, address, options.batch, options.steps, options.seeds, options.hidden)
        finally:
            (work / "done").touch()
    mirror.SIZES["full"] += ["--model.d-model", str(options.hidden)]
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedCluster(2, rate=options.rate, platform="cpu") as nodes,
    ):
        mirror.prepare(Path(folder), "llama", "full")
        role = [folder, nodes.network.address(1)]
        result = nodes.run(lambda node: [sys.executable, *sys.argv, "--role", str(node), *role])
        print(json.dumps({"bytes sent by the run": nodes.link_bytes()[0].sent}))
        sys.exit(result.code)


if __name__ == "__main__":
    main()
