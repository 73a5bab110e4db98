#!/usr/bin/env python3
"""Time the phases of a GRPO step under several presets, in one run, on weights drawn at random.

    zerojax emulate --nodes 2 --gpus-per-node 1 --rate 10gbit -- \\
        scripts/bench/grpo.py --nodes 2 --local 1 --presets zero3 zero++ delta

The phases are `zerojax posttrain`'s: copy (of the weights, into every node), generate (the prefill and
all tokens), log-probabilities under the weights that made the tokens, and one update on them, from the copy.
Each device has --rows rows of equal length. "a token" is the difference between a long and a short
generation, in which the prefill cancels out; bytes are a node's on its link (None without
zerojax emulate).
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import harness
import jax
import numpy as np
import optax
from rows import sent_so_far

import zerojax
from zerojax.models import GPT, GPTConfig
from zerojax.multihost.distributed import joined
from zerojax.posttrain.loss.objectives import log_probs_of, policy_loss
from zerojax.run.config import PosttrainSection
from zerojax.zero_config.config import PRESETS, Preset

SETTINGS = PosttrainSection(method="grpo")


@dataclass(frozen=True)
class Phase:
    """The figures of one phase.

    Attributes:
        milliseconds: median, minimum and maximum.
        sent: bytes that a node put on its link, the median; None without a link.
    """

    preset: str
    name: str
    milliseconds: tuple[float, float, float]
    sent: float | None

    def __str__(self) -> str:
        median, least, most = self.milliseconds
        sent = "" if self.sent is None else f"  sent {self.sent / 1e6:.1f} MB"
        return f"{self.preset:12} {self.name:18}{median:9.1f} ms ({least:.1f} to {most:.1f}){sent}"


def main() -> None:
    """Parse the command line, time each preset's phases, print a line for each, write JSON."""
    sizes = {"nodes": 1, "local": 1, "layers": 24, "d_model": 2048, "vocab": 50304, "rows": 64}
    parser = harness.parser(__doc__, **sizes, prompt=128, new=256, short=16, accumulate=4, repeats=3)
    parser.add_argument("--presets", nargs="+", choices=PRESETS, default=["zero3", "zero++", "delta"])
    parser.add_argument("--remat", choices=("full", "attention", "none"), default="full")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    with joined():
        phases: list[Phase] = []
        for preset in options.presets:
            found = measure(preset, options)
            phases += found
            if jax.process_index() == 0:
                print(*found, sep="\n", flush=True)
        if jax.process_index() == 0:
            harness.write(options.json, phases)


def measure(preset: Preset, options: argparse.Namespace) -> list[Phase]:
    """The figures of a preset: of each phase, of a token, and of the whole step."""
    config = GPTConfig(
        vocab_size=options.vocab, layers=options.layers, d_model=options.d_model,
        heads=options.d_model // 128 or 1, max_seq_len=options.prompt + options.new, loss_chunk=8192,
    )  # fmt: skip
    mesh = zerojax.make_mesh(options.nodes, options.local)
    zero = zerojax.ZeroConfig.preset(preset, remat=options.remat, accumulate=options.accumulate)
    state = zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-6), policy_loss(SETTINGS), mesh=mesh, zero=zero
    )
    rows = options.rows * len(jax.local_devices())
    rng = np.random.default_rng(jax.process_index())
    prompts = list(rng.integers(0, options.vocab, (rows, options.prompt)).astype(np.int32))
    batch = {"tokens": rng.integers(0, options.vocab, (rows, options.prompt + options.new)).astype(np.int32)}
    batch["mask"] = np.ones((rows, options.prompt + options.new - 1), np.float32)
    batch["mask"][:, : options.prompt - 1] = 0
    batch |= {"old_log_probs": -batch["mask"], "advantages": batch["mask"]}

    copied = state

    def copy() -> None:
        nonlocal copied
        copied = jax.block_until_ready(zerojax.with_replica(state))

    def generate(new: int) -> None:
        zerojax.generate(copied, prompts, new, seed=1, slots=options.rows)

    def log_probs() -> None:
        jax.block_until_ready(zerojax.predict_step(copied, batch, log_probs_of(SETTINGS)))

    def update() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(zerojax.train_step(copied, batch))

    # The first update makes the copies that delta begins with.
    calls = {
        "update": update,
        "copy": copy,
        "log-probabilities": log_probs,
        "generate": partial(generate, options.new),
        "generate, short": partial(generate, options.short),
    }
    found = {
        name: _timed(preset, name, call, options.repeats, copy if name == "update" else None)
        for name, call in calls.items()
    }
    short = found.pop("generate, short")
    return [*found.values(), _of_a_token(found["generate"], short, options), _whole(found)]


def _timed(
    preset: str,
    name: str,
    call: Callable[[], Any],
    repeats: int,
    prepare: Callable[[], Any] | None,
) -> Phase:
    """The figures of a call that waits for its devices, each time after another; the first compiles."""
    seconds: list[float] = []
    sent: list[int] = []
    for number in range(1 + repeats):
        if prepare is not None:
            prepare()
        before = sent_so_far()
        took = harness.seconds_of(call, 1, untimed=0)
        if number:
            seconds += took
            sent += [] if before is None else [(sent_so_far() or 0) - before]
    in_ms = harness.spread([1e3 * x for x in seconds])
    return Phase(preset, name, in_ms, statistics.median(sent) if sent else None)


def _of_a_token(long: Phase, short: Phase, options: argparse.Namespace) -> Phase:
    """Time and bytes of each token beyond a short generation's."""
    tokens = options.new - options.short
    median, least, most = ((x - short.milliseconds[0]) / tokens for x in long.milliseconds)
    sent = None if long.sent is None or short.sent is None else (long.sent - short.sent) / tokens
    return Phase(long.preset, "a token", (median, least, most), sent)


def _whole(phases: dict[str, Phase]) -> Phase:
    """Time and bytes of all phases together."""
    every = list(phases.values())
    median, least, most = (sum(p.milliseconds[i] for p in every) for i in range(3))
    sent = [p.sent for p in every if p.sent is not None]
    return Phase(every[0].preset, "step", (median, least, most), sum(sent) if sent else None)


if __name__ == "__main__":
    main()
