#!/usr/bin/env python3
"""Measure the errors of the wire formats on the gradients of a trained GPT, beside their theoretical values.

    scripts/bench/gradient_errors.py runs/gpt-tiny --out docs/gradient_errors

Every device of a 2 x 4 mesh takes the gradient of its own part of a batch; the two-hop reduction brings
their mean to the owners, once in fp32 and once in each format. Of the matrices (vectors travel
unquantized) it reports

- error: |g' - g| / |g|, g the exact mean;
- bias: <g' - g, g> / |g|^2, how much longer or shorter the gradient became;
- theory: the error if every block were Gaussian. One encoding of a Gaussian block has a known relative
  error e; hop 1 adds it to each device's gradient g_d, hop 2 to each node's sum s_n, independently:
  sqrt(e1^2 sum |g_d|^2 + e2^2 sum |s_n|^2) / |sum g_d|.

Writes OUT.md, a table.
"""

import argparse
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import pallas_kernels
import zerojax
from zerojax.cli.trained import open_trained
from zerojax.comm.collectives import UnitComm
from zerojax.run.config import MeshSection, ZeroSection
from zerojax.run.data import TrainBatches, make_rows, open_dataset
from zerojax.run.run_dir import RunFolder
from zerojax.sharding.layout import ParamLayout, make_layout, unflatten
from zerojax.sharding.mesh import AXES, MeshShape
from zerojax.sharding.param_tree import from_tree
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.train.step import gradients
from zerojax.zero_config import ZeroConfig

NODES, LOCAL = 2, 4


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    local: str
    node: str
    block: int = 256
    rotation: int = 0
    rounding: str = "nearest"

    @property
    def zero(self) -> ZeroConfig:
        """The options that ask for it."""
        return ZeroConfig(
            grads=(self.local, self.node),
            block_size=self.block,
            rotation=self.rotation,
            rounding=self.rounding,  # pyright: ignore[reportArgumentType]  (one of the two by construction)
        )


def cases() -> list[Case]:
    """Each format on both hops, then what matters for int8/int4."""
    rows = [Case(fmt, fmt) for fmt in ("bf16", "fp8", "int8", "fp6", "int4", "int2")]
    rows += [
        Case("int8", "int4", block, rotation, rounding)
        for block in (64, 128, 256, 1024)
        for rotation in (0, 32)
        for rounding in ("nearest", "stochastic")
    ]
    return [
        *rows,
        Case("int4", "int4", rotation=32),
        Case("int4", "int4", rotation=32, rounding="stochastic"),
    ]


def device_gradients(run: Path) -> dict[tuple[str, ...], np.ndarray]:
    """Per matrix ``[devices, *shape]``: each device's gradient of its part of one batch, fp32."""
    folder = RunFolder(run)
    config = replace(folder.read_config(), zero=ZeroSection(compute_dtype="float32"))
    trained = open_trained(folder, config, MeshSection(nodes=1, local=1))
    data = open_dataset(config.data, folder.data)
    batches = TrainBatches(
        [make_rows(part.train, config.train.sequence_length, config.data.packing) for part in data.parts],
        weights=data.weights,
        batch_size=4 * NODES * LOCAL,
        seed=12345,
    )
    batch = {name: x.reshape(NODES * LOCAL, 4, -1) for name, x in next(batches).items()}
    parts = [{name: x[device] for name, x in batch.items()} for device in range(NODES * LOCAL)]
    found = [from_tree(gradients(trained.state, part)) for part in parts]
    leaves = {leaf.path: leaf for leaf in trained.state.spec.leaves if len(leaf.shape) > 1}

    def natural(path: tuple[str, ...], leaf: ParamLayout) -> np.ndarray:
        layers = leaf.layers
        rows = [np.asarray(each[path]).reshape(layers, -1)[:, : leaf.size] for each in found]
        return np.stack(rows).reshape(len(found), layers, *leaf.shape)

    return {
        (*path, str(layer)): natural(path, leaf)[:, layer]
        for path, leaf in leaves.items()
        for layer in range(leaf.layers)
    }


def reduced(grads: dict[tuple[str, ...], np.ndarray], zero: ZeroConfig) -> dict[tuple[str, ...], np.ndarray]:
    """The mean over the mesh as the two hops give it."""
    mesh = zerojax.make_mesh(NODES, LOCAL)
    leaves = tuple(
        make_layout(path, x.shape[1:], "float32", (), index=i, world=MeshShape(NODES, LOCAL), zero=zero)
        for i, (path, x) in enumerate(grads.items())
    )
    comm = UnitComm(ShardingStrategy.of(zero), leaves)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec(AXES),
        out_specs=PartitionSpec(("local", "node")),
        check_vma=False,
    )
    def reduce(values: list[jax.Array]) -> list[jax.Array]:
        return list(comm.reduce_gradients(tuple(x[0] for x in values), jnp.uint32(7)))

    sums = reduce(list(grads.values()))
    return {
        leaf.path: np.asarray(unflatten(x, leaf)) / (NODES * LOCAL)
        for leaf, x in zip(leaves, sums, strict=True)
    }


def gaussian_error(fmt: str, block: int, rounding: str) -> float:
    """The relative error of one encoding of Gaussian numbers."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1 << 20)), jnp.float32)
    if fmt in pallas_kernels.QUANTIZED:
        payload = pallas_kernels.encode(x, fmt, block=block, rounding=rounding, seed=jnp.uint32(1))
        back = pallas_kernels.decode(payload, fmt, x.shape[1], block=block, dtype=jnp.float32)
    else:
        back = x.astype(jnp.bfloat16).astype(jnp.float32)
    return float(jnp.linalg.norm(back - x) / jnp.linalg.norm(x))


def norm(parts: list[np.ndarray]) -> float:
    """The Euclidean norm of all values together."""
    return float(np.sqrt(sum(float(np.sum(np.square(part, dtype=np.float64))) for part in parts)))


def row(case: Case, grads: dict[tuple[str, ...], np.ndarray]) -> str:
    """Measure one case."""
    exact = {path: x.astype(np.float64).mean(0) for path, x in grads.items()}
    got = reduced(grads, case.zero)
    difference = {path: got[path] - exact[path] for path in exact}
    length = norm(list(exact.values()))
    error = norm(list(difference.values())) / length
    bias = sum(float(np.sum(difference[path] * exact[path])) for path in exact) / length**2
    first, second = (gaussian_error(fmt, case.block, case.rounding) for fmt in (case.local, case.node))
    nodes = [x.reshape(NODES, LOCAL, *x.shape[1:]).sum(1) for x in grads.values()]
    spread = np.sqrt((first * norm(list(grads.values()))) ** 2 + (second * norm(nodes)) ** 2)
    theory = float(spread) / (length * NODES * LOCAL)
    return (
        f"| {case.local} / {case.node} | {case.block} | {case.rotation or '-'} | {case.rounding} "
        f"| {error:.2%} | {theory:.2%} | {error / theory:.2f} | {bias:+.3%} |"
    )


def main() -> None:
    """Parse the command line, measure all cases, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder with a checkpoint")
    parser.add_argument("--out", type=Path, default=Path("docs/gradient_errors"))
    options = parser.parse_args()
    grads = device_gradients(options.run)
    lines = [
        "# Gradient errors",
        "",
        "The error that each wire format adds to a gradient: [how it was measured](wire.md#gradient-errors).",
        "",
        "| local / node | block | rotation | rounding | error | theory | ratio | bias |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in cases():
        lines.append(row(case, grads))
        print(lines[-1], flush=True)
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
