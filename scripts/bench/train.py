#!/usr/bin/env python3
"""Time training steps of one model on one mesh under several ways of sharding, in one run.

    scripts/bench/train.py --nodes 1 --local 8 --sequences 4
    zerojax emulate --nodes 2 --gpus-per-node 4 --rate 10gbit -- \\
        scripts/bench/train.py --nodes 2 --local 4 --variants zero3 zero++ delta

The model is a stack of pre-norm GPT blocks without embeddings (--llama: RMS norms, rotary positions and
SwiGLU; --qwen3-moe: those and a mixture of experts, without losses of its router; --qwen3.5: three layers of
gated linear attention, then one of gated attention), fed random bf16 activations, to measure the blocks and
their communication. train_fsdp2.py runs the same stack in PyTorch. The script remarks on a loss that differs
by more than 1% from the loss of the first variant with as many micro-batches after the same steps ("local"
reports the step before the last). In "zero3-sp" the devices of a node share each row, so --sequences counts
rows of all of them. The variants of LoRA train adapters of rank 16 beside a frozen base ("qlora": in nf4).
Steps after the timed ones are traced (unless --no-trace): "hidden" is the fraction of their communication
beside compute, "exposed" the time of a step with nothing but communication. Several --rates of an emulated
cluster's links are timed one after the other, without recompiling.
"""

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rows import LINEAR, Row, Sizes, add_model_options, document_ends, line, sent_so_far, speed_of

import zerojax
from zerojax.analysis.profile import measure_overlap, read_events, trace_files
from zerojax.comm.xla_options import GPU_OPTIONS
from zerojax.models import Block, GPTConfig
from zerojax.models.flash_attention import document_offsets
from zerojax.models.rope import Rope, rope_of
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.multihost.distributed import joined
from zerojax.network import nccl
from zerojax.testing.emulated_cluster import limit_link
from zerojax.zero_config import PRESETS

BASES: dict[str, dict[str, Any]] = {
    **{preset: {"preset": preset} for preset in PRESETS},
    "lora": {"preset": "zero3", "frozen": ("*",)},
    "qlora": {"preset": "zero3", "frozen": ("*",), "frozen_weights": "nf4"},
}
"""What the name of a variant begins with, and the options of ``ZeroConfig.preset`` that it stands for."""
ENDS: dict[str, dict[str, Any]] = {
    "sp": {"shared": True},
    "int8": {"grads": ("int8", "int8")},
    "gathered": {"experts": "gathered"},
    "fp8": {"matmul_dtype": "fp8"},
    "host": {"host": ("optimizer",)},
    "breadth": {"accumulate_order": "breadth"},
    "x8": {"accumulate": 8},
    "bf16-moments": {"moments": "bfloat16"},
    "float8-moments": {"moments": "float8"},
    "backward": {"update_in_backward": True},
    "node": {"state_spread": "node"},
}
"""What it may go on with, each after a hyphen."""
RANK = 16
"""Of the adapters."""
TRACED_STEPS = 2
_UNTIMED = 2
"""Steps with each rate before the timed ones."""


class BlockStack(nnx.Module):
    """The model: blocks only."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Draw the weights."""
        self.config = config
        kinds = [partial(Block, kind) for kind, _ in config.kinds]
        self.blocks = zerojax.Stack([kinds[kind] for kind in config.order], config.layers, rngs=rngs)

    def rope(self, length: int) -> Rope | None:
        """The rotary table of this device's tokens of a sequence, if positions are rotary."""
        if self.config.positions != "rope":
            return None
        return rope_of(self.config, zerojax.own_tokens(jnp.arange(length), axis=0), length)

    def __call__(self, x: jax.Array, length: int, segments: jax.Array | None) -> jax.Array:
        """Activations in, activations out; of this device's tokens of sequences of a length."""
        documents = None if segments is None else document_offsets(segments)
        return self.blocks(x, self.rope(length), None, documents)


def make_model(config: GPTConfig, rngs: nnx.Rngs) -> BlockStack:
    """The model, for a train state."""
    return BlockStack(config, rngs=rngs)


def loss_fn(model: BlockStack, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean square distance to a target, in fp32."""
    x, y = zerojax.own_tokens((batch["x"], batch["y"]))
    out = model(x, batch["x"].shape[1], batch.get("segments")).astype(jnp.float32)
    return jnp.mean(jnp.square(out - y.astype(jnp.float32)))


def main() -> None:
    """Parse the command line, run the variants, print the table, write JSON."""
    parser = harness.parser(__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--local", type=int, required=True)
    add_model_options(parser)
    parser.add_argument("--remat", choices=("full", "attention", "none"), default="full")
    parser.add_argument("--steps", type=int, default=8, help="timed steps, after three untimed ones")
    parser.add_argument(
        "--seconds", type=float, default=math.inf,
        help="with each rate, begin no step after so many: if none is timed by then, the last one counts",
    )  # fmt: skip
    parser.add_argument("--variants", nargs="+", type=variant_of, default=["zero3", "zero++", "delta"])
    parser.add_argument(
        "--ahead", action="store_true",
        help="begin a step before the one before it has ended, as training does: a time is that between ends",
    )  # fmt: skip
    traces = parser.add_mutually_exclusive_group()
    traces.add_argument("--profile", type=Path, help="keep the traces here")
    traces.add_argument("--no-trace", action="store_true", help="do not trace: no overlap figures")
    parser.add_argument(
        "--xla", nargs="+", default=[], metavar="OPTION=VALUE",
        help="an option of the compiler, instead of zerojax.comm.xla_options (true, false or a number)",
    )  # fmt: skip
    options = parser.parse_args()
    for name, _, value in (given.partition("=") for given in options.xla):
        GPU_OPTIONS[name] = json.loads(value)
    with joined():
        rows: list[Row] = []
        for variant in options.variants:
            for row in measure(variant, options):
                rows.append(row)
                if jax.process_index() == 0:
                    print(line(row) + remark(row, rows), flush=True)
        if jax.process_index() == 0:
            print(*nccl.applied(), sep="\n")
            harness.write(options.json, rows)


def options_of(variant: str) -> dict[str, Any]:
    """The options that a variant's name stands for: "zero3-host-breadth-x8".

    Raises:
        ArgumentTypeError: the name has a part that ``BASES`` and ``ENDS`` lack.
    """
    base = max((name for name in BASES if f"{variant}-".startswith(f"{name}-")), key=len, default="")
    options, rest = dict(BASES.get(base, {})), variant.removeprefix(base)
    while rest and (end := next((name for name in ENDS if f"{rest}-".startswith(f"-{name}-")), "")):
        options |= ENDS[end]
        rest = rest.removeprefix(f"-{end}")
    if rest or not base:
        known = f"{', '.join(BASES)}, followed by any of -{', -'.join(ENDS)}"
        raise argparse.ArgumentTypeError(f"no variant {variant!r}: there are {known}")
    if base == "lora" and "matmul_dtype" in options:
        options["frozen_weights"] = "fp8"
    return options


def variant_of(name: str) -> str:
    """The name, if ``options_of`` knows it."""
    options_of(name)
    return name


def remark(row: Row, rows: list[Row]) -> str:
    """Of a loss that is more than 1% from the first variant's with the same micro-batches and rate."""
    first = next(r for r in rows if (r.micro_batches, r.rate) == (row.micro_batches, row.rate))
    apart = row.loss / first.loss - 1
    return "" if abs(apart) < 0.01 else f"  loss {apart:+.1%} from {first.variant}"


def measure(variant: str, options: argparse.Namespace) -> Iterator[Row]:
    """Compile one variant and time it with each rate of the links."""
    fields = options_of(variant)
    sharing = options.local if fields.pop("shared", False) else 1
    zero = zerojax.ZeroConfig.preset(
        fields.pop("preset"), remat=options.remat, sequence_parallel=sharing, **fields
    )
    accumulate = zero.accumulate
    state = zerojax.TrainState.create(
        partial(make_model, make_config(options)),
        optax.adamw(1e-4),
        loss_fn,
        mesh=zerojax.make_mesh(options.nodes, options.local),
        zero=zero,
        lora=zerojax.LoRA(rank=RANK) if zero.frozen else None,
    )
    batch = make_batch(options, accumulate, sharing)
    world, frozen = options.nodes * options.local, bool(zero.frozen)
    tokens = options.seq * options.sequences * accumulate * world // sharing
    flops = Sizes.of(options).flops_per_token(options.layers, options.seq, frozen=frozen)
    state, _, (compile_seconds,) = timed(1, state, batch)
    for rate in options.rates:
        if rate is not None:
            limit_link(rate)
        before = sent_so_far()
        state, metrics, seconds = timed(
            _UNTIMED + options.steps, state, batch, options.seconds, ahead=options.ahead
        )
        sent = None if before is None else ((sent_so_far() or 0) - before) / len(seconds)
        seconds = seconds[_UNTIMED:] or seconds[-1:]
        exposed = hidden = None
        if not options.no_trace:
            state, exposed, hidden = trace(variant, state, batch, options.profile)
        stats = jax.local_devices()[0].memory_stats() or {}
        yield Row(
            variant=variant,
            micro_batches=accumulate,
            rate=rate,
            **vars(speed_of(seconds, tokens, flops, world, options.peak_tflops)),
            sent_per_node=sent,
            peak_gib=stats["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in stats else None,
            loss=float(metrics["loss"]),
            grad_norm=float(metrics["grad_norm"]),
            compile_seconds=compile_seconds,
            exposed_ms=exposed,
            hidden=hidden,
        )


def make_config(options: argparse.Namespace) -> GPTConfig:
    """The configuration of the blocks, from the command line."""
    sizes = Sizes.of(options)
    family: dict[str, Any] = {"norm": "rms", "positions": "rope", "mlp": "swiglu"} if sizes.rms else {}
    if sizes.linear:
        keys, values = LINEAR.heads(sizes.d_model)
        family |= {
            "recurrent_layers": tuple(n for n in range(options.layers) if n % 4 != 3),
            "recurrent_key_heads": keys,
            "recurrent_heads": values,
            "recurrent_key_width": LINEAR.width,
            "recurrent_width": LINEAR.width,
            "attention_gate": True,
            "rope_fraction": 0.25,
        }
    return GPTConfig(
        vocab_size=256,
        layers=options.layers,
        d_model=sizes.d_model,
        heads=sizes.heads,
        head_width=sizes.head_width,
        kv_heads=sizes.kv_heads,
        ffn=sizes.ffn,
        experts=sizes.experts,
        experts_per_token=sizes.per_token,
        qk_norm=sizes.qk_norm,
        max_seq_len=options.seq,
        biases=False,
        **family,
    )


def timed(
    steps: int, state: Any, batch: Any, most: float = math.inf, *, ahead: bool = False
) -> tuple[Any, dict[str, jax.Array], list[float]]:
    """The state after some steps, the metrics of the last, and the seconds of each.

    ``most`` and ``ahead`` are --seconds and --ahead.
    """
    metrics, seconds = {}, []
    ended = time.perf_counter()
    for _ in range(steps):
        begun = ended if ahead else time.perf_counter()
        before, (state, metrics) = metrics, zerojax.train_step(state, batch)
        # With --ahead, times belong to the step before; the first are not counted.
        jax.block_until_ready(before if ahead else (state, metrics))
        ended = time.perf_counter()
        seconds.append(ended - begun)
        if most < math.inf and run_on_process_zero(lambda: sum(seconds) > most):
            break
    return jax.block_until_ready(state), metrics, seconds


def trace(variant: str, state: Any, batch: Any, keep: Path | None) -> tuple[Any, float, float]:
    """The state after three more steps, the exposed milliseconds per step, and the hidden fraction."""
    with tempfile.TemporaryDirectory() as folder:
        # Every node writes traces, and the nodes of an emulated cluster share a file system.
        place = (keep or Path(folder)) / variant / f"process{jax.process_index()}"
        with jax.profiler.trace(str(place)):
            state, _, _ = timed(1 + TRACED_STEPS, state, batch)
        events = read_events(trace_files(place)[-1])
    own = [event for event in events if event.device == events[0].device]
    # Nodes do not start tracing at the same time: in the first step some wait for others.
    overlap = measure_overlap(own[len(own) // (1 + TRACED_STEPS) :])
    return state, 1e3 * (overlap.total - overlap.hidden) / TRACED_STEPS, overlap.fraction


def make_batch(
    options: argparse.Namespace, accumulate: int, sharing: int
) -> dict[str, jax.Array | np.ndarray]:
    """Random activations and targets, the same in every run; ``sharing`` devices share a row."""
    rng = np.random.default_rng(jax.process_index())
    rows = options.sequences * accumulate * len(jax.local_devices()) // sharing
    shape = (rows, options.seq, options.d_model)
    batch: dict[str, np.ndarray] = {
        name: rng.standard_normal(shape, np.float32).astype(jnp.bfloat16) for name in "xy"
    }
    groups = zerojax.make_mesh(options.nodes, options.local).devices.reshape(-1, sharing)
    mesh = jax.sharding.Mesh(groups, ("groups", "devices"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("groups"))
    if options.documents > 1:
        numbers = np.searchsorted(document_ends(options), np.arange(options.seq), side="right") + 1
        batch["segments"] = np.broadcast_to(numbers.astype(np.int32), shape[:2])
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in batch.items()}


if __name__ == "__main__":
    main()
