#!/usr/bin/env python3
"""Time one version of the weights from trainers' GPUs to an engine's: compare, encode, send, apply.

    scripts/bench/engines.py --senders 0 --engine cuda:0 --changed 0.001 0.01 0.1 --adam 1e-6 5e-6 --rate 10

Each sender, a process on the GPU with that number, draws its share of the matrices of LLaMA 3 8B. They
publish them, change some weights, and publish again: by one unit in the last place of bf16 at random, or by a
step of Adam with random gradients. An engine's process with PyTorch has the tensors in GPU memory. ``--rate``
limits all senders together, in Gb/s, by a token bucket. Prints a line of JSON for each version.
``--mirror FOLDER`` measures a receiver that keeps a Hugging Face folder instead.
"""

import argparse
import functools
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

import harness
import jax
import jax.numpy as jnp
import numpy as np

from zerojax.interop.engines import receiver
from zerojax.interop.engines.encoder import Compared, Cut, compare, full_patch, rounded
from zerojax.interop.engines.layout import Part
from zerojax.interop.engines.publisher import patches_of
from zerojax.interop.engines.receiver.channel import Channel
from zerojax.interop.engines.receiver.ends import TOKEN, Feed
from zerojax.interop.engines.receiver.mirror import Log
from zerojax.interop.engines.receiver.patches import FULL, Patch

# Outputs and inputs of a layer's matrices in LLaMA 3 8B.
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
EMBEDDING = (128256, 4096)
SECRET = "the token of this benchmark"
STACK = 8
"""Layers in an array."""
HERE = Path(__file__).resolve().parent


class Rate:
    """Lets a number of bytes a second through."""

    def __init__(self, gigabits: float) -> None:
        self.gigabits, self._free, self._lock = gigabits, 0.0, threading.Lock()

    def wait(self, size: int) -> None:
        """Wait until this many bytes may be sent."""
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + 8e-9 * size / self.gigabits
            pause = self._free - now
        time.sleep(max(0.0, pause))


class Weights:
    """A sender's share of the matrices on its device, as a ``receiver.Source``."""

    def __init__(self, layers: int, scale: int, rank: int, ranks: int) -> None:
        self.session, self.version = "1", FULL
        self._changed, self._log = threading.Condition(), Log(4 << 30)
        self._parts: list[Part] = []
        self.values: list[jax.Array] = []
        tensors: list[Any] = []
        matrices: list[Any] = []
        pieces: list[Any] = []
        every = [
            (f"{i}.{name}", shape, min(STACK, layers - i))
            for i in range(0, layers, STACK)
            for name, shape in SHAPES.items()
        ]
        for name, (rows, columns), depth in [*every, ("embed", EMBEDDING, 1), ("head", EMBEDDING, 1)]:
            rows, share = rows // scale, rows // scale * columns // ranks
            cut = Cut.of(share)
            for layer in range(depth):
                # The engine's tensor is (out, in), the trainer's parameter (in, out).
                matrices.append([rows, [[len(tensors), 0, columns, 0, rows, 0, 1, columns]]])
                tensors.append([f"{name}.{layer}.weight", "BF16", [rows, columns]])
            for owner in range(ranks):
                if owner == rank:
                    self._parts.append(Part((name,), jax.devices()[0], depth, cut, "bfloat16", len(pieces)))
                    self.values.append(_drawn(jax.random.key(len(pieces)), depth * share))
                starts = range(owner * share, owner * share + cut.pieces * cut.size, cut.size)
                stop = (owner + 1) * share
                pieces += [
                    [len(matrices) - depth + layer, cut.size, [[0, start, min(start + cut.size, stop)]]]
                    for layer in range(depth)
                    for start in starts
                ]
        self.manifest = json.dumps(
            {"files": {}, "tensors": tensors, "matrices": matrices, "pieces": pieces}
        ).encode()
        self._place = {number: i for i, part in enumerate(self._parts) for number in part.numbers}
        self._shards: list[Compared] = []
        self._sums: list[np.ndarray] = []
        self.count = sum(x.size for x in self.values)

    def publish(self) -> dict[str, float]:
        """Compare and encode; returns seconds, bytes and changed weights."""
        start = time.monotonic()
        before = [shard.values for shard in self._shards] or [None] * len(self.values)
        shards = [
            compare(rounded(x, dtype="bfloat16", layers=part.layers, cut=part.cut), old)
            for x, old, part in zip(self.values, before, self._parts, strict=True)
        ]
        del before
        jax.block_until_ready(shards)
        compared = time.monotonic()
        sums = jax.device_get([shard.sums for shard in shards])
        found: dict[int, list[Patch]] = {}
        if self._shards:
            found = patches_of(self._parts, shards, self._shards, sums, (self.version, self.version + 1))
        encoded = time.monotonic()
        with self._changed:
            self._log.add(found)
            self._shards, self._sums, self.version = shards, sums, self.version + 1
            self._changed.notify_all()
        every = [patch for own in found.values() for patch in own]
        return {
            "start": start,
            "compare": compared - start,
            "encode": encoded - compared,
            "bytes": sum(len(patch.header()) + len(patch.body) for patch in every),
            "changed": sum(patch.count for patch in every),
            "full": len(self._place) - len(every),
        }

    def description(self) -> tuple[str, bytes, list[int]]:
        """As ``receiver.Source``."""
        return self.session, self.manifest, list(self._place)

    def wait_newer(self, version: int, seconds: float) -> int:
        """As ``receiver.Source``."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > version, seconds)
            return self.version

    def patches(self, piece: int, before: int) -> list[Patch]:
        """As ``receiver.Source``."""
        with self._changed:
            found, version = self._log.chain(piece, before, self.version), self.version
        if found is not None:
            return found
        i = self._place[piece]
        return [full_patch(self._shards[i], self._sums[i], piece - self._parts[i].first, piece, version)]


@functools.partial(jax.jit, static_argnums=1)
def _drawn(key: jax.Array, count: int) -> jax.Array:
    return 0.02 * jax.random.normal(key, (count,))


@functools.partial(jax.jit, donate_argnums=0)
def _nudged(x: jax.Array, key: jax.Array, share: jax.Array) -> jax.Array:
    """Move a share of the weights by one unit in the last place of bf16."""
    random = jax.random.bits(key, x.shape)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    step = jnp.where(random & 1, 1, 65535).astype(jnp.uint16)
    moved = jax.lax.bitcast_convert_type(bits + step, jnp.bfloat16)
    return jnp.where((random >> 1) * 2.0**-31 < share, moved.astype(jnp.float32), x)


@functools.partial(jax.jit, donate_argnums=0)
def _adam(x: jax.Array, key: jax.Array, rate: jax.Array) -> jax.Array:
    """The eleventh step of Adam on independent gradients, with its moments from the ten before."""

    def moments(i: int, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        gradient = jax.random.normal(jax.random.fold_in(key, i), x.shape)
        return 0.9 * found[0] + 0.1 * gradient, 0.99 * found[1] + 0.01 * gradient**2

    mean, square = jax.lax.fori_loop(0, 11, moments, (jnp.zeros_like(x), jnp.zeros_like(x)))
    return x - rate * (mean / (1 - 0.9**11)) / (jnp.sqrt(square / (1 - 0.99**11)) + 1e-8)


def send(options: argparse.Namespace) -> None:
    """A sender: changes and publishes its share as its input says."""
    rank, ranks = options.rank, len(options.senders)
    weights = Weights(options.layers, options.scale, rank, ranks)
    _limit(Rate(options.rate / ranks))
    feed = Feed(weights, options.address, SECRET, options.flows)
    print(json.dumps({"weights": weights.count}), flush=True)
    for number, line in enumerate(sys.stdin):
        name, value = json.loads(line)
        change = {"changed": _nudged, "adam": _adam}.get(name)
        if change is None and name != "first":
            print(json.dumps(weights.publish()), flush=True)
            continue
        if change is not None:
            keys = jax.random.split(jax.random.key(1000 * number + rank), len(weights.values))
            for i, key in enumerate(keys):
                weights.values[i] = change(weights.values[i], key, jnp.float32(value))
        jax.block_until_ready(weights.values)
        print(json.dumps("ready"), flush=True)
    feed.close()


class Child:
    """A process that reads and prints lines of JSON."""

    def __init__(self, command: list[str], variables: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=os.environ | variables
        )
        self._lines = queue.Queue[Any]()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self._lines.put(json.loads(line) if line[:1] in '{["' else line)
        self._lines.put({"ended": True})

    def say(self, message: Any) -> None:
        """Write a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """The next line."""
        found = self._lines.get(timeout=180)
        if isinstance(found, dict) and "ended" in found:
            raise SystemExit(f"{self.process.args} has ended")
        return found


def main() -> None:
    """Parse the command line, start the processes, and print."""
    parser = harness.parser(__doc__, layers=32, repeats=3)
    parser.add_argument("--scale", type=int, default=1, help="divide each matrix's outputs by this")
    parser.add_argument("--changed", type=float, nargs="*", default=[0.001, 0.01, 0.1])
    parser.add_argument("--adam", type=float, nargs="*", default=[], help="learning rates")
    parser.add_argument("--rate", type=float, default=10.0, help="Gb/s; the first version's too")
    parser.add_argument("--flows", type=int, default=8, help="of each sender")
    parser.add_argument("--senders", nargs="+", default=["0"], help="a GPU for each")
    parser.add_argument("--engine", default="cuda:0", help="device of the engine's tensors")
    parser.add_argument("--python", default=sys.executable, help="with PyTorch, for the engine")
    parser.add_argument("--mirror", type=Path, help="measure a folder of files instead of the engine")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        send(options)
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        options.address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory(dir=options.mirror) as folder:
        engine = _engine(options, folder)
        engine.hear()
        arguments = [*sys.argv[1:], "--address", options.address, "--rank"]
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.72 / len(options.senders):.2f}"}
        senders = [
            Child([sys.executable, __file__, *arguments, str(rank)], memory | {"CUDA_VISIBLE_DEVICES": gpu})
            for rank, gpu in enumerate(options.senders)
        ]
        try:
            _measure(options, senders, engine)
        finally:
            for child in (*senders, engine):
                child.process.kill()
                child.process.wait()


def _engine(options: argparse.Namespace, folder: str) -> Child:
    package = Path(receiver.__file__).parent
    variables = {
        TOKEN: SECRET,
        "PYTHONPATH": f"{package.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    if options.mirror:
        command = ["-m", "receiver", "--listen", options.address, "--mirror", folder]
    else:
        command = [str(HERE / "engine_process.py"), options.address, options.engine, SECRET]
    return Child([options.python, *command], variables)


def _measure(options: argparse.Namespace, senders: list[Child], engine: Child) -> None:
    count = sum(child.hear()["weights"] for child in senders)
    cases = [("changed", value) for value in options.changed] + [("adam", value) for value in options.adam]
    for repeat, (name, value) in [
        (0, ("first", 0)),
        *((i, case) for case in cases for i in range(options.repeats)),
    ]:
        for said in ([name, value], ["publish", 0]):
            for child in senders:
                child.say(said)
            heard = [child.hear() for child in senders]
        seen, now = engine.hear(), time.monotonic()
        start = min(one["start"] for one in heard)
        found = {key: max(one[key] for one in heard) for key in ("compare", "encode")}
        found |= {key: sum(one[key] for one in heard) for key in ("bytes", "changed", "full")}
        total = (seen["resumed"] if isinstance(seen, dict) else now) - start
        found |= {"total": total, "share": found["changed"] / count}
        if isinstance(seen, dict):
            found |= {key: seen[key] - start for key in ("first", "last", "paused")}
            found |= {
                "pause": seen["resumed"] - seen["paused"],
                "decoding": seen["decoding"],
                "GiB": seen["GiB"],
            }
        found["bytes a change"] = found["bytes"] / max(found["changed"], 1)
        for rate in (10, 1):
            found[f"link, {rate} Gb/s"] = found["bytes"] * 8e-9 / rate
            found[f"6 bytes a change, {rate} Gb/s"] = found["changed"] * 48e-9 / rate
        shown = {key: round(x, 4) for key, x in found.items()}
        print(json.dumps({"case": f"{name} {value}", "repeat": repeat} | shown), flush=True)
    if not options.mirror:
        engine.say("verify")
        print(json.dumps(engine.hear()), flush=True)


def _limit(rate: Rate) -> None:
    send = Channel.send

    def limited(channel: Channel, content: dict[str, Any] | Patch | bytes) -> None:
        if isinstance(content, Patch):
            rate.wait(len(content.header()) + len(content.body))
        send(channel, content)

    Channel.send = limited  # pyrefly: ignore[bad-assignment]  (for the measurement alone)


if __name__ == "__main__":
    main()
