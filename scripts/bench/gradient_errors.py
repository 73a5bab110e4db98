#!/usr/bin/env python3
"""What the wire formats do to the gradients of a trained GPT, beside what theory gives.

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

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import harness

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import pallas_kernels
import zerojax
from zerojax.cli.trained import TrainedRun, open_trained
from zerojax.comm.reduction import GradientReduction
from zerojax.models import parameter_count
from zerojax.run.config import MeshSection
from zerojax.run.data.batches import TrainBatches, make_rows
from zerojax.run.data.dataset import Dataset, open_dataset
from zerojax.run.run_dir import RunFolder
from zerojax.sharding.layout import ParamShape, make_layout, unflatten
from zerojax.sharding.mesh import AXES, MeshShape
from zerojax.sharding.param_tree import from_tree
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.train.step import gradients
from zerojax.zero_config.config import ZeroConfig
from zerojax.zero_config.options import Rounding, WireFormat

NODES, LOCAL = 2, 4
LeafPath = tuple[str, ...]
Shapes = tuple[tuple[LeafPath, tuple[int, ...]], ...]
Unit = dict[LeafPath, np.ndarray]
"""Matrices that are reduced together, by path: ``[devices, *shape]``, fp32."""


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    local: WireFormat
    node: WireFormat
    block: int = 256
    rotation: Literal[0, 32] = 0
    rounding: Rounding = "nearest"

    @property
    def zero(self) -> ZeroConfig:
        """The options that ask for it."""
        return ZeroConfig(
            grads=(self.local, self.node),
            block_size=self.block,
            rotation=self.rotation,
            rounding=self.rounding,
        )


def cases() -> list[Case]:
    """Each format on both hops, then what matters for int8/int4."""
    formats: tuple[WireFormat, ...] = ("bf16", "fp8", "int8", "fp6", "int4", "int2")
    rows = [Case(fmt, fmt) for fmt in formats]
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


def device_gradients(trained: TrainedRun, data: Dataset, sequences: int) -> list[Unit]:
    """Each device's gradient of its part of one batch: of the matrices outside the layers, then per layer."""
    train, settings, devices = trained.config.train, trained.config.data, NODES * LOCAL
    batches = TrainBatches(
        [
            make_rows(part.train, train.sequence_length, settings.packing, labels=settings.masked)
            for part in data.parts
        ],
        weights=data.weights,
        batch_size=sequences * devices,
        seed=12345,
    )
    batch = {name: x.reshape(devices, sequences, -1) for name, x in next(batches).items()}
    batches.close()
    units: list[Unit] = [{} for _ in range(1 + max(leaf.layers for leaf in trained.state.spec.leaves))]
    for device in range(devices):
        found = from_tree(gradients(trained.state, {name: x[device] for name, x in batch.items()}))
        for leaf in trained.state.spec.leaves:
            if len(leaf.shape) < 2:
                continue
            whole = np.asarray(found[leaf.path]).reshape(leaf.layers, -1)[:, : leaf.size]
            for unit, layer in zip(units[1:] if leaf.stack else units, whole, strict=False):
                unit.setdefault(leaf.path, np.empty((devices, *leaf.shape), np.float32))
                unit[leaf.path][device] = layer.reshape(leaf.shape)
    return [unit for unit in units if unit]


def reduced(unit: Unit, zero: ZeroConfig, seed: int) -> Unit:
    """The mean over the mesh as the two hops give it."""
    leaves, reduce = reducer(shapes_of(unit), zero)
    sums = reduce(list(unit.values()), np.uint32(seed))
    return {
        leaf.path: np.asarray(unflatten(x, leaf)) / (NODES * LOCAL)
        for leaf, x in zip(leaves, sums, strict=True)
    }


def shapes_of(unit: Unit) -> Shapes:
    """The shapes of a unit's matrices."""
    return tuple((path, x.shape[1:]) for path, x in unit.items())


def compile_all(units: list[Unit]) -> None:
    """Compile all reductions, several at a time."""
    with ThreadPoolExecutor() as threads:
        for case in cases():
            for shapes, unit in {shapes_of(unit): unit for unit in units}.items():
                lowered = reducer(shapes, case.zero)[1].lower(list(unit.values()), np.uint32(0))
                threads.submit(lowered.compile)


@cache
def reducer(shapes: Shapes, zero: ZeroConfig) -> tuple[Any, Any]:
    """The layouts of some matrices, and the compiled reduction, which all layers share."""
    world = MeshShape(NODES, LOCAL)
    leaves = tuple(
        make_layout(ParamShape(path, shape, "float32", ()), index=i, world=world, zero=zero)
        for i, (path, shape) in enumerate(shapes)
    )
    reduction = GradientReduction(ShardingStrategy.of(zero), leaves, world)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=zerojax.make_mesh(NODES, LOCAL),
        in_specs=(PartitionSpec(AXES), PartitionSpec()),
        out_specs=PartitionSpec(("local", "node")),
        check_vma=False,
    )
    def reduce(values: list[jax.Array], seed: jax.Array) -> list[jax.Array]:
        return list(reduction.reduce(tuple(x[0] for x in values), seed))

    return leaves, reduce


@cache
def gaussian_error(fmt: str, block: int, rounding: str) -> float:
    """The relative error of one encoding of Gaussian numbers."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1 << 20)), jnp.float32)
    if fmt in pallas_kernels.QUANTIZED:
        payload = pallas_kernels.encode(x, fmt, block=block, rounding=rounding, seed=jnp.uint32(1))
        back = pallas_kernels.decode(payload, fmt, x.shape[1], block=block, dtype=jnp.float32)
    else:
        back = x.astype(jnp.bfloat16).astype(jnp.float32)
    return float(jnp.linalg.norm(back - x) / jnp.linalg.norm(x))


def square(x: np.ndarray) -> float:
    """The sum of the squares."""
    return float(np.sum(np.square(x, dtype=np.float64)))


class Exact(NamedTuple):
    """What is known of a matrix's gradients.

    Attributes:
        mean: over the devices, fp64.
        devices: sum of the squares of each device's.
        nodes: sum of the squares of each node's sum.
    """

    mean: np.ndarray
    devices: float
    nodes: float

    @classmethod
    def of(cls, x: np.ndarray) -> "Exact":
        """From gradients ``[devices, *shape]``."""
        nodes = x.reshape(NODES, LOCAL, *x.shape[1:]).sum(1)
        return cls(x.mean(0, dtype=np.float64), square(x), square(nodes))


def row(case: Case, units: list[Unit], known: list[dict[LeafPath, Exact]]) -> str:
    """Measure one case."""
    zero, length, error, along, variance = case.zero, 0.0, 0.0, 0.0, 0.0
    for seed, (unit, exact) in enumerate(zip(units, known, strict=True)):
        for path, got in reduced(unit, zero, seed).items():
            mean, devices, nodes = exact[path]
            difference = got - mean
            length += square(mean)
            error += square(difference)
            along += float(np.vdot(difference, mean))
            name = "/".join(path)
            first, second = (
                gaussian_error(zero.wire_format_of(name, mean.ndim, fmt), case.block, case.rounding)
                for fmt in (case.local, case.node)
            )
            variance += (first**2 * devices + second**2 * nodes) / (NODES * LOCAL) ** 2
    relative, theory = (error / length) ** 0.5, (variance / length) ** 0.5
    figures = f"{relative:.2%}", f"{theory:.2%}", f"{relative / theory:.2f}", f"{along / length:+.3%}"
    shape = f"{case.local} / {case.node}", case.block, case.rotation or "-"
    return harness.cells(*shape, case.rounding, *figures)


def main() -> None:
    """Parse the command line, measure all cases, write the table."""
    parser = harness.parser(__doc__)
    parser.add_argument("run", type=Path, help="a run folder with a checkpoint")
    parser.add_argument("--sequences", type=int, default=4, help="of each device's part of the batch")
    parser.add_argument("--out", type=Path, default=Path("docs/gradient_errors"))
    options = parser.parse_args()
    folder = RunFolder(options.run)
    config = replace(folder.read_config(), zero=ZeroConfig(compute_dtype="float32"))
    trained = open_trained(folder, config, MeshSection(nodes=1, local=1))
    units = device_gradients(trained, open_dataset(config.data, folder.data), options.sequences)
    lines = [
        "# Gradient errors",
        "",
        "This page lists the error that each wire format adds to a gradient of a model of "
        f"{parameter_count(config.model):,} parameters after {trained.step:,} steps: "
        "[how it was measured](wire.md#gradient-errors).",
        "",
        *harness.heads("local / node", "block", "rotation", "rounding", "error", "theory", "ratio", "bias"),
    ]
    known = [{path: Exact.of(x) for path, x in unit.items()} for unit in units]
    compile_all(units)
    for case in cases():
        lines.append(row(case, units, known))
        print(lines[-1], flush=True)
        options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
