#!/usr/bin/env python3
"""Time one version of the weights from a device to a receiver's folder: compare, encode, send, apply.

    scripts/bench/engines.py --layers 32 --changed 0.001 0.01 0.1 --rates 10 1

draws the matrices of LLaMA 3 8B's layers, publishes them, changes some weights by one unit in the last place
of bf16 at random, and publishes again. ``--adam LR`` changes them by steps of Adam on random gradients. A
receiver in another process keeps the mirror in memory. ``--rates`` limit the sending side, in Gb/s, by a
token bucket in the sender. Prints a line of JSON for each share.
"""

import argparse
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zerojax.interop.engines import receiver
from zerojax.interop.engines.encoder import Cut, compare, full_patch
from zerojax.interop.engines.layout import Part
from zerojax.interop.engines.publisher import patches_of
from zerojax.interop.engines.receiver import FULL, Feed, Log, Patch

# Outputs and inputs of a layer's matrices in LLaMA 3 8B.
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
EMBEDDING = (128256, 4096)
TOKEN = "the token of this benchmark"


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
    """The matrices on the device, as a ``receiver.Source``."""

    def __init__(self, shapes: dict[str, tuple[int, int]], scale: int) -> None:
        self.session, self.version = "1", FULL
        self._changed, self._log = threading.Condition(), Log(4 << 30)
        self._parts: list[Part] = []
        tensors: list[Any] = []
        matrices: list[Any] = []
        pieces: list[Any] = []
        self.values: list[jax.Array] = []
        for i, (name, (rows, columns)) in enumerate(shapes.items()):
            rows //= scale
            # The engine's tensor is (out, in), the trainer's parameter (in, out).
            tensors.append([f"{name}.weight", "BF16", [rows, columns]])
            matrices.append([rows, [[i, 0, columns, 0, rows, 0, 1, columns]]])
            cut = Cut.of(rows * columns)
            self._parts.append(Part((name,), jax.devices()[0], 1, cut, "bfloat16", len(pieces)))
            for start in range(0, cut.pieces * cut.size, cut.size):
                stop = min(start + cut.size, rows * columns)
                pieces.append([i, cut.size, [[0, start, stop]]])
            self.values.append(_drawn(jax.random.key(i), rows * columns))
        self.manifest = json.dumps(
            {"files": {}, "tensors": tensors, "matrices": matrices, "pieces": pieces}
        ).encode()
        self._place = {number: i for i, part in enumerate(self._parts) for number in part.numbers}
        self._shards: list[Any] = []
        self._sums: list[np.ndarray] = []
        self.count = sum(x.size for x in self.values)

    def publish(self) -> dict[str, float]:
        """Compare and encode; returns seconds, bytes and changed weights."""
        jax.block_until_ready(self.values)
        start = time.monotonic()
        before = [shard.values for shard in self._shards] or [None] * len(self.values)
        shards = [
            compare(x, old, dtype="bfloat16", layers=1, cut=part.cut)
            for x, old, part in zip(self.values, before, self._parts, strict=True)
        ]
        jax.block_until_ready(shards)
        compared = time.monotonic()
        found: dict[int, list[Patch]] = {}
        sums = [np.asarray(shard.sums) for shard in shards]
        if self._shards:
            versions = self.version, self.version + 1
            for part, now, old, own in zip(self._parts, shards, self._shards, sums, strict=True):
                found |= patches_of(part, now, old, own, versions)
        encoded = time.monotonic()
        with self._changed:
            self._log.add(found)
            self._shards, self._sums, self.version = shards, sums, self.version + 1
            self._changed.notify_all()
        every = [patch for own in found.values() for patch in own]
        return {
            "compare": compared - start,
            "encode": encoded - compared,
            "bytes": sum(len(patch.to_bytes()) for patch in every),
            "changed": sum(patch.count for patch in every),
            "full": sum(part.cut.pieces for part in self._parts) - len(every),
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


@jax.jit
def _nudged(x: jax.Array, key: jax.Array, share: jax.Array) -> jax.Array:
    """Move a share of the weights by one unit in the last place of bf16."""
    chosen, sign = jax.random.uniform(key, x.shape) < share, jax.random.bernoulli(key, shape=x.shape)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    moved = jax.lax.bitcast_convert_type(bits + jnp.where(sign, 1, 65535).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(chosen, moved.astype(jnp.float32), x)


@jax.jit
def _adam(x: jax.Array, key: jax.Array, rate: jax.Array) -> jax.Array:
    """A step of Adam after many: the mean gradient over its root mean square, about normal."""
    return x - rate * jax.random.normal(key, x.shape) * 0.3


def main() -> None:
    """Parse the command line, publish and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--scale", type=int, default=1, help="divide each matrix's outputs by this")
    parser.add_argument("--changed", type=float, nargs="*", default=[0.001, 0.01, 0.1])
    parser.add_argument("--adam", type=float, nargs="*", default=[], help="learning rates")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[10.0], help="Gb/s; the first version's too"
    )
    parser.add_argument("--flows", type=int, default=8)
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between versions")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mirror", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    shapes = {f"{i}.{name}": shape for i in range(options.layers) for name, shape in SHAPES.items()}
    weights = Weights(shapes | {"embed": EMBEDDING, "head": EMBEDDING}, options.scale)
    rate = Rate(options.rates[0])
    _limit(rate)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory(dir=options.mirror) as folder:
        command = [sys.executable, "-I", receiver.__file__, "--listen", address, "--mirror", folder]
        process = subprocess.Popen(
            command, env=os.environ | {receiver.TOKEN: TOKEN}, stdout=subprocess.DEVNULL
        )
        feed = Feed(weights, address, TOKEN, options.flows)
        try:
            _measure(options, weights, feed, rate)
        finally:
            feed.close()
            process.kill()
            process.wait()


def _measure(options: argparse.Namespace, weights: Weights, feed: Feed, rate: Rate) -> None:
    def published() -> dict[str, float]:
        start = time.monotonic()
        found = weights.publish()
        while feed.serving < weights.version:
            time.sleep(0.002)
        return found | {"total": round(time.monotonic() - start, 3)}

    print(json.dumps({"first, in full": published(), "weights": weights.count}), flush=True)
    cases = [("changed", value, _nudged) for value in options.changed]
    cases += [("adam", value, _adam) for value in options.adam]
    for repeat in range(options.repeats):
        for name, value, change in cases:
            for rate.gigabits in options.rates:
                keys = jax.random.split(jax.random.key(1000 * repeat + 1), len(weights.values))
                for i, key in enumerate(keys):
                    weights.values[i] = change(weights.values[i], key, jnp.float32(value))
                time.sleep(options.pause)  # the receiver's second folder, which a step would hide
                found = published()
                found["bytes a change"] = found["bytes"] / max(found["changed"], 1)
                found["share"] = found["changed"] / weights.count
                shown = {key: round(x, 5) for key, x in found.items()}
                print(json.dumps({name: value, "Gb/s": rate.gigabits} | shown), flush=True)


def _limit(rate: Rate) -> None:
    send = receiver.Channel._send

    def limited(channel: receiver.Channel, kind: int, data: bytes) -> None:
        rate.wait(len(data))
        send(channel, kind, data)

    receiver.Channel._send = limited  # pyright: ignore[reportAttributeAccessIssue]  (for the measurement alone)


if __name__ == "__main__":
    main()
