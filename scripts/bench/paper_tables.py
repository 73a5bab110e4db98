#!/usr/bin/env python3
"""Compare the planner's predictions with Tables 1 and 8 of the ZeRO++ paper (Wang et al., 2023).

    scripts/bench/paper_tables.py

Prints Markdown. The paper gives sizes, not shapes: 18B is Megatron-LM's (Narayanan et al., 2021), and the
others have its widths. TFLOP/s include recomputation, as in the paper's formula. Matmuls on V100 are assumed
to reach 61.44 of 125 TFLOP/s, from the paper's Table 7 for 18B with hpZ; on A100 the fraction measured here
on H200. The V100s use fp16, of the size of bf16.
"""

import harness
import jax
import optax

import zerojax
from zerojax.analysis.gpus import GPUS, MATMUL_EFFICIENCY
from zerojax.analysis.plan import Cluster
from zerojax.analysis.plan.cluster import on_world
from zerojax.analysis.plan.hops import hops_of
from zerojax.analysis.plan.memory import predict_memory
from zerojax.analysis.plan.speed import predict_step
from zerojax.analysis.plan.work import decoder_work
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.models.config import attended_tokens
from zerojax.sharding.mesh import MeshShape
from zerojax.train.spec import TrainSpec
from zerojax.zero_config.config import Preset

PREDICTED: tuple[Preset, ...] = ("zero3", "zero++-paper", "delta")
# layers, width, heads
SHAPES = {
    "7.5B": (36, 4096, 32),
    "18B": (40, 6144, 48),
    "49B": (60, 8192, 64),
    "91B": (72, 10240, 80),
    "138B": (76, 12288, 96),
}
GIGABIT = 1e9 / 8
V100 = ("v100-32", 61.44 / 125)
A100 = ("a100-80", MATMUL_EFFICIENCY)

# nodes, GPUs a node, GPU, Gb/s a node, model, tokens a GPU, the paper's ZeRO-3 and ZeRO++ TFLOP/s
TABLE_1 = [
    (24, 16, V100, 100, "138B", 2048, 19.96, 37.90),
    (24, 16, V100, 100, "138B", 1024, 11.25, 21.81),
    (24, 16, V100, 100, "91B", 2048, 19.99, 38.06),
    (24, 16, V100, 100, "91B", 1024, 11.27, 21.93),
    (24, 16, V100, 100, "49B", 2048, 20.06, 38.08),
    (24, 16, V100, 100, "49B", 1024, 11.27, 21.95),
    (24, 16, V100, 100, "18B", 2048, 25.98, 46.40),
    (24, 16, V100, 100, "18B", 1024, 14.15, 30.57),
    (24, 16, V100, 800, "138B", 2048, 47.55, 55.30),
    (24, 16, V100, 800, "138B", 1024, 34.19, 44.38),
    (24, 16, V100, 800, "91B", 2048, 47.74, 56.26),
    (24, 16, V100, 800, "91B", 1024, 34.49, 44.36),
    (24, 16, V100, 800, "49B", 2048, 48.05, 56.24),
    (24, 16, V100, 800, "49B", 1024, 34.54, 44.46),
    (24, 16, V100, 800, "18B", 2048, 47.31, 53.65),
    (24, 16, V100, 800, "18B", 1024, 31.27, 37.87),
    (4, 8, A100, 100, "18B", 2048, 64.99, 111.66),
    (4, 8, A100, 100, "18B", 1024, 34.52, 65.2),
    (4, 8, A100, 400, "18B", 2048, 134.65, 134.94),
    (4, 8, A100, 400, "18B", 1024, 85.16, 93.12),
]
TABLE_8 = [
    (4, 16, V100, 10, "18B", 2048, 9.72, 31.94),
    (4, 16, V100, 10, "18B", 1024, 4.98, 19.16),
    (4, 16, V100, 10, "18B", 512, 2.51, 10.03),
    (4, 16, V100, 10, "7.5B", 2048, 10.07, 24.51),
    (4, 16, V100, 10, "7.5B", 1024, 4.81, 15.90),
    (4, 16, V100, 10, "7.5B", 512, 2.48, 7.32),
]


def model(size: str) -> tuple[GPTConfig, TrainSpec]:
    """A size's shape and its program, without values."""
    layers, width, heads = SHAPES[size]
    config = GPTConfig(vocab_size=50304, layers=layers, d_model=width, heads=heads, max_seq_len=2048)
    state = zerojax.TrainState.abstract(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), lm_loss, mesh=zerojax.make_mesh(2, 1)
    )
    return config, state.spec


def teraflops(config: GPTConfig, spec: TrainSpec, cluster: Cluster, tokens: int, preset: Preset) -> float:
    """Predicted TFLOP/s of one GPU, recomputation counted, the attention as a full square."""
    zero = zerojax.ZeroConfig.preset(preset)
    there = on_world(spec, MeshShape(cluster.nodes, cluster.local), zero)
    work = decoder_work(config, remat="full", dtype="bfloat16", sequences=1, length=tokens)
    memory = predict_memory(there, work)
    seconds = predict_step(there, work, hops_of(there), memory, cluster).seconds
    head = 6 * config.vocab_size * config.d_model * tokens
    other_half = 12 * config.attention_width * sum(attended_tokens(config, tokens)) * tokens
    return (4 / 3 * (work.model_flops + other_half - head) + head) / seconds / 1e12


def main() -> None:
    """Print both tables."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    models = {size: model(size) for size in SHAPES}
    for title, rows in (("Table 1", TABLE_1), ("Table 8", TABLE_8)):
        print(f"\n{title}, predicted beside measured, TFLOP/s a GPU\n")
        harness.table(
            "cluster", "Gb/s", "model", "tokens a GPU", "zero3 predicted", "paper", "zero++-paper predicted",
            "paper", "speed-up predicted", "paper", "delta predicted",
        )  # fmt: skip
        for nodes, local, (gpu, efficiency), gigabits, size, tokens, zero3, plus in rows:
            cluster = Cluster(nodes, local, GPUS[gpu], gigabits * GIGABIT, efficiency=efficiency)
            found = [teraflops(*models[size], cluster, tokens, preset) for preset in PREDICTED]
            cells = [f"{nodes} x {local} {gpu}", gigabits, size, tokens, f"{found[0]:.1f}", f"{zero3:.1f}"]
            cells += [f"{found[1]:.1f}", f"{plus:.1f}", f"{found[1] / found[0]:.2f}x", f"{plus / zero3:.2f}x"]
            harness.row(*cells, f"{found[2]:.1f}")


if __name__ == "__main__":
    main()
