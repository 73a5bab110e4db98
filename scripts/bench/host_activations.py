#!/usr/bin/env python3
"""Measure what it costs to keep a stack's activations in host memory, beside JAX's own policy, on one GPU.

    python3 scripts/bench/host_activations.py            # about 90 s on an H100
    python3 scripts/bench/host_activations.py --small    # small shapes, for a CPU

A step of SGD of 24 blocks of width 4096 on 16,384 tokens, which keep their inputs for the backward pass and
compute the rest again (``remat="full"``): by ``zerojax.Stack`` with and without ``host=("activations",)``,
and by ``jax.lax.scan`` over the same block in ``jax.checkpoint``, with and without its policy
``save_and_offload_only_these_names``. Each is compiled in a separate thread. "device" is the compiled
program's memory on the device beside its arguments, "host" its memory on the host. A case that fails prints
its error, and the others run.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import harness
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import zerojax
from zerojax.comm.xla_options import compiler_options
from zerojax.models import GPTConfig
from zerojax.models.block import Block
from zerojax.sharding.memory import HOST

ON_GPU = jax.default_backend() == "gpu"
RATE = 1e-3


class Products(nnx.Module):
    """Two matmuls: so little compute that the copies take longer than the forward pass."""

    def __init__(self, width: int, *, rngs: nnx.Rngs):
        make = partial(nnx.Linear, width, width, use_bias=False, rngs=rngs)
        self.up, self.down = make(), make()

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply them."""
        return x + self.down(jnp.tanh(self.up(x)))


@dataclass(frozen=True)
class Shape:
    """Of the stack and its input."""

    layers: int
    width: int
    rows: int
    length: int

    def blocks(self) -> dict[str, Callable[..., nnx.Module]]:
        """Factories by name."""
        config = GPTConfig(
            vocab_size=256,
            d_model=self.width,
            heads=self.width // 128 if ON_GPU else 2,
            ffn=8 * self.width // 3 // 256 * 256 or self.width,
            norm="rms",
            mlp="swiglu",
            biases=False,
            max_seq_len=self.length,
            attention="cudnn" if ON_GPU else "xla",
        )
        return {"LLaMA's block": partial(Block, config), "two matmuls": partial(Products, self.width)}

    def batch(self) -> jax.Array:
        """bf16 activations."""
        return jax.random.normal(jax.random.key(0), (self.rows, self.length, self.width), jnp.bfloat16)


Step = Callable[[], Any]
Made = tuple[Callable[[], Step], Any]
"""What makes the arrays of a variant and returns its step; and the variant's memory."""


def by_zerojax(block: Callable[..., nnx.Module], shape: Shape, *, host: bool) -> Made:
    """The step of a train state."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.stack = zerojax.Stack(block, shape.layers, rngs=rngs)

    def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean(jnp.square(model.stack(batch["x"]).astype(jnp.float32)))

    zero = zerojax.ZeroConfig(host=("activations",) if host else ())
    make = {"mesh": zerojax.make_mesh(1, 1), "zero": zero}
    like = jax.eval_shape(shape.batch)
    abstract = zerojax.TrainState.abstract(Model, optax.sgd(RATE), loss, **make)
    lowered = zerojax.lower_train_step(abstract, {"x": like})
    memory = lowered.compile().memory_analysis()  # train_step finds the program in the cache

    def start() -> Step:
        states = [zerojax.TrainState.create(Model, optax.sgd(RATE), loss, **make)]
        batch = {"x": shape.batch()}

        def step() -> jax.Array:
            states[0], metrics = zerojax.train_step(states[0], batch)
            return metrics["loss"]

        return step

    return start, memory


def by_jax(block: Callable[..., nnx.Module], shape: Shape, *, host: bool) -> Made:
    """A scan over fp32 weights, each layer cast to bf16."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return block(rngs=rngs)

    def init() -> Any:
        return nnx.state(make(nnx.Rngs(0).split(shape.layers)), nnx.Param)

    graph, _ = nnx.split(nnx.eval_shape(lambda: block(rngs=nnx.Rngs(0))))
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names("input")
    if host:
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["input"],
            offload_src="device",
            offload_dst=HOST,
        )

    @partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def layer(x: jax.Array, weights: Any) -> jax.Array:
        x = checkpoint_name(x, "input")
        return nnx.merge(graph, jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights))(x)

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, own: (layer(x, own), None), x, weights)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def update(weights: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), value

    mesh = zerojax.make_mesh(1, 1)
    everywhere = NamedSharding(mesh, PartitionSpec())
    # The options with which it is faster: without CUDA graphs only if there is something to copy.
    options = compiler_options(mesh, host_memory=host)
    jitted = jax.jit(update, donate_argnums=0, out_shardings=everywhere, compiler_options=options)
    placed = partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere))
    compiled = jitted.lower(placed(jax.eval_shape(init)), placed(jax.eval_shape(shape.batch))).compile()

    def start() -> Step:
        weights = [jax.jit(init, out_shardings=everywhere)()]
        x = jax.device_put(shape.batch(), everywhere)

        def step() -> jax.Array:
            weights[0], value = compiled(weights[0], x)
            return value

        return step

    return start, compiled.memory_analysis()


def measure(shape: Shape, steps: int) -> None:
    """Print the table."""
    harness.table("block", "by", "activations", "step, ms", "ratio", "device, GB", "host, GB")
    blocks, makers = shape.blocks(), {"zerojax": by_zerojax, "jax": by_jax}
    variants = list(itertools.product(blocks, makers, (False, True)))
    with ThreadPoolExecutor(len(variants)) as pool:
        made = [
            (name, by, host, pool.submit(makers[by], blocks[name], shape, host=host))
            for name, by, host in variants
        ]
        alone: dict[tuple[str, str], float] = {}
        for name, by, host, future in made:
            where = "host" if host else "device"
            try:
                start, memory = future.result()
                seconds = harness.seconds_of(_waiting(start()), steps, untimed=2)
            except Exception as error:
                harness.row(name, by, where, repr(str(error)[:200]), "", "", "")
                continue
            took = 1e3 * statistics.median(seconds)
            ratio = took / alone.setdefault((name, by), took)
            sizes = (memory.temp_size_in_bytes, memory.host_temp_size_in_bytes)
            harness.row(name, by, where, f"{took:.1f}", f"{ratio:.2f}", *(f"{x / 1e9:.2f}" for x in sizes))


def _waiting(step: Step) -> Callable[[], Any]:
    """The step with a wait for its result. Its arrays are freed with it."""
    return lambda: jax.block_until_ready(step())


def main() -> None:
    """Print a table."""
    parser = harness.parser(__doc__, layers=24, width=4096, steps=4)
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--rows", type=int, default=2, help="sequences")
    parser.add_argument("--length", type=int, default=8192, help="tokens of each")
    args = parser.parse_args()
    shape = Shape(3, 64, 2, 16) if args.small else Shape(args.layers, args.width, args.rows, args.length)
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        begun = time.perf_counter()
        measure(shape, args.steps)
        print(f"\n{jax.devices()[0].device_kind}, {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
