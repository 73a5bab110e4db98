"""Every hop, bit for bit, against numpy on an independent codec.

One call carries a whole unit: leaves of every format and of sizes that divide nothing, so that their
joining into one payload is under test as well.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference_codec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from wire_reference import Wire, mix

import zerojax
from zerojax.comm import coalesced
from zerojax.comm.reduction import GradientReduction
from zerojax.sharding import wire_format
from zerojax.sharding.layout import ParamLayout, ParamShape, make_layout
from zerojax.sharding.mesh import MeshShape
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.weights import Weight, beside, to_full, to_secondary

FORMATS = ("fp32", "bf16", "fp8", "int8", "fp6", "int4", "int2")
SIZES = (1, 7, 113, 300, 64, 1021, 257)
WEIGHTS = [(fmt, FORMATS[i - 3]) for i, fmt in enumerate(FORMATS)] + [("int8", "int8")]
GRADS = [
    ("int8", "int4"),
    ("int4", "int4"),
    ("fp32", "int4"),
    ("int8", "bf16"),
    ("fp8", "fp6"),
    ("fp6", "fp8"),
    ("int2", "int8"),
    ("bf16", "bf16"),
    ("int4", "int2"),
    ("fp32", "fp32"),
]
DTYPES = ("float32", "bfloat16")
MESHES = ((2, 4), (3, 2), (1, 5), (4, 1), (1, 1))
SEED = 77
QUIET = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def leaf_and_wire(
    mesh: tuple[int, int], size: int, number: int = 0, dtype: str = "float32", **zero: Any
) -> tuple[ParamLayout, Wire]:
    """The same leaf as zerojax lays it out and as the reference does."""
    nodes, local = mesh
    config = zerojax.ZeroConfig(compute_dtype="float32", precise=(), **zero)
    parameter = ParamShape(("w",), (1, size), dtype, ())
    leaf = make_layout(parameter, index=number, world=MeshShape(nodes, local), zero=config)
    formats = (*config.weight_formats, *config.grad_formats)
    quantized = any(fmt in reference_codec.TOP for fmt in formats)
    wire = Wire(
        nodes,
        local,
        size,
        config.weight_formats,
        (config.grad_formats.local, config.grad_formats.node),
        config.block_size,
        padded_to=config.chunks * (config.block_size if quantized else 1),
        rounding=config.rounding,
        rotation=config.rotation,
        number=number,
    )
    assert leaf.shard == wire.shard
    return leaf, wire


STAGE_3 = ShardingStrategy.of(zerojax.ZeroConfig(compute_dtype="float32"))


def reduction_of(
    leaves: Sequence[ParamLayout], grad_level: Any = "primary", **plan: Any
) -> GradientReduction:
    """The reduction of their gradients, at stage 3 in fp32."""
    return GradientReduction(
        dataclasses.replace(STAGE_3, grad_level=grad_level, **plan), tuple(leaves), leaves[0].world
    )


def gathered(leaves: Sequence[ParamLayout], shards: Sequence[jax.Array]) -> list[jax.Array]:
    """Whole weights, of primary shards."""
    weights = tuple(Weight(x, leaf, "primary") for x, leaf in zip(shards, leaves, strict=True))
    return [w.values for w in to_full(to_secondary(weights))]


def on_mesh(mesh: tuple[int, int], run: Callable[..., Any], *values: Any) -> Any:
    """Run one device's function on values indexed [node, local], and collect them likewise."""
    spec = PartitionSpec("node", "local")

    def device(*blocks: Any) -> Any:
        out = run(*jax.tree.map(lambda x: x[0, 0], blocks))
        return jax.tree.map(lambda x: x[None, None], out)

    mapped = jax.shard_map(
        device, mesh=zerojax.make_mesh(*mesh), in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.tree.map(np.asarray, jax.jit(mapped)(*values))


def owned(wire: Wire, w: np.ndarray) -> np.ndarray:
    """A leaf's blocks at their owners, [node, local, shard]."""
    return wire.pad(w).transpose(1, 0, 2)


def weights_of(wires: Sequence[Wire], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal(w.size) * 10.0 ** rng.integers(-4, 3)).astype(np.float32) for w in wires]


def grads_of(wires: Sequence[Wire], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((w.nodes, w.local, 1, w.size)).astype(np.float32) for w in wires]


def same_bits(found: np.ndarray, wanted: np.ndarray) -> None:
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("mesh", "block"),
    [
        pytest.param(mesh, block, marks=pytest.mark.slow if i in (1, 4) else ())
        for i, (mesh, block) in enumerate(zip(MESHES, (64, 128, 256, 2048, 64), strict=True))
    ],
)
def test_gather_brings_every_weight_to_everyone(mesh, block):
    pairs = [
        leaf_and_wire(mesh, size, i, DTYPES[i % 2], weights=node, local_weights=local, block_size=block)
        for i, (size, (node, local)) in enumerate(zip((*SIZES, 512), WEIGHTS, strict=True))
    ]
    leaves, wires = zip(*pairs, strict=True)
    natural = weights_of(wires)

    def run(*shards: jax.Array) -> Any:
        return gathered(leaves, shards)

    shards = [owned(wire, w) for wire, w in zip(wires, natural, strict=True)]
    for wire, w, leaf, found in zip(wires, natural, leaves, on_mesh(mesh, run, *shards), strict=True):
        wanted = wire.whole(w).astype(jnp.dtype(leaf.dtype)).reshape(1, wire.size)
        same_bits(found, np.broadcast_to(wanted, found.shape))


REDUCTIONS = [
    ((2, 4), {"block_size": 64, "chunks": 2, "rounding": "stochastic", "rotation": 32}),
    ((2, 4), {"block_size": 256, "chunks": 1}),
    ((3, 2), {"block_size": 64, "chunks": 4, "rounding": "stochastic"}),
    ((3, 2), {"block_size": 512, "chunks": 1, "rotation": 32}),
    ((1, 5), {"block_size": 64, "chunks": 2, "rotation": 32}),
    ((4, 1), {"block_size": 128, "chunks": 1, "rounding": "stochastic"}),
    ((1, 1), {"block_size": 2048, "chunks": 4}),
    ((2, 2), {"block_size": 1024, "chunks": 2}),
]


def reduction(mesh: tuple[int, int], options: dict[str, Any], pairs: Sequence[tuple[str, str]]) -> Any:
    """Leaves and wires with one pair of gradient formats each; an option that a pair refuses is dropped."""
    made = []
    for i, grads in enumerate(pairs):
        own = dict(options)
        if not set(grads) & set(reference_codec.TOP):
            own = {name: value for name, value in own.items() if name not in ("rounding", "rotation")}
        if own.get("grads_hops") == 1:
            own.pop("chunks", None)
        made.append(leaf_and_wire(mesh, SIZES[i % len(SIZES)], i, grads=grads, **own))
    leaves, wires = zip(*made, strict=True)
    return leaves, wires


@pytest.mark.parametrize(
    ("mesh", "options"),
    # Always the one with every option, and that of one device.
    [pytest.param(*x, marks=() if i in (0, 6) else pytest.mark.slow) for i, x in enumerate(REDUCTIONS)],
    ids=str,
)
def test_two_hops_bring_every_sum_to_its_owner(mesh, options):
    leaves, wires = reduction(mesh, options, GRADS)
    grads, chunks = grads_of(wires), options["chunks"]

    def run(*grads: jax.Array) -> Any:
        return reduction_of(leaves, "primary", chunks=chunks).reduce(grads, jnp.uint32(SEED))

    for wire, grad, found in zip(wires, grads, on_mesh(mesh, run, *grads), strict=True):
        same_bits(found, wire.two_hops(grad, SEED, chunks))


@pytest.mark.parametrize(
    ("mesh", "options"),
    [*(pytest.param(*REDUCTIONS[i], marks=pytest.mark.slow) for i in (2, 3, 4)), REDUCTIONS[5]],
    ids=str,
)
def test_separate_hops_and_error_feedback(mesh, options):
    """What the local hop leaves, what the node hop adds to it, and what the residual remembers."""
    leaves, wires = reduction(mesh, {**options, "chunks": 1}, GRADS)
    grads = grads_of(wires)

    def first(*grads: Any) -> Any:
        return reduction_of(leaves, "secondary").reduce(grads, jnp.uint32(SEED))

    def second(sums: Any, residuals: Any) -> Any:
        reduction = reduction_of(leaves)
        plain, nothing = reduction.reduce_node(sums, jnp.uint32(SEED))
        assert nothing is None
        fed, kept = reduction.reduce_node(sums, jnp.uint32(SEED), residuals)
        return plain, fed, residuals if kept is None else kept

    sums = on_mesh(mesh, first, *grads)
    residuals = [np.full_like(x, 0.01) for x in sums]
    found = on_mesh(mesh, second, sums, residuals)
    for i, wire in enumerate(wires):
        same_bits(sums[i], wire.local_sums(grads[i], SEED))
        same_bits(found[0][i], wire.node_sums(sums[i], SEED)[0])
        fed, kept = wire.node_sums(sums[i], SEED, residuals[i])
        same_bits(found[1][i], fed)
        if kept is not None:
            np.testing.assert_allclose(found[2][i], kept, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [((2, 4), {"rounding": "stochastic"}), ((3, 2), {"rotation": 32}), ((1, 1), {})],
    ids=str,
)
def test_one_hop_brings_every_sum_to_its_owner(mesh, options):
    same = [(fmt, fmt) for fmt in FORMATS]
    leaves, wires = reduction(mesh, {"block_size": 64, "grads_hops": 1, **options}, same)
    grads = grads_of(wires)

    def run(*grads: jax.Array) -> Any:
        return reduction_of(leaves, "primary", hops=1).reduce(grads, jnp.uint32(SEED))

    for wire, grad, found in zip(wires, grads, on_mesh(mesh, run, *grads), strict=True):
        same_bits(found, wire.one_hop(grad, SEED))


@pytest.mark.parametrize(
    ("mesh", "stored"),
    [
        ((2, 4), "bf16"),
        ((4, 1), "fp32"),
        pytest.param((2, 4), "fp32", marks=pytest.mark.slow),
        pytest.param((4, 1), "bf16", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_delta_adds_the_same_difference_everywhere(mesh, stored):
    options = {"hpz": True, "weights_delta": True, "local_weights": stored, "block_size": 64}
    pairs = [
        leaf_and_wire(mesh, size, weights=fmt, **options) for size, fmt in zip(SIZES, FORMATS, strict=True)
    ]
    leaves, wires = zip(*pairs, strict=True)
    dtype = ml_dtypes.bfloat16 if stored == "bf16" else np.float32
    before, after = weights_of(wires, 1), weights_of(wires, 1)
    after = [w + 0.01 * rng for w, rng in zip(after, weights_of(wires, 2), strict=True)]
    copies = [wire.pad(w).astype(dtype) for wire, w in zip(wires, before, strict=True)]
    held = [np.broadcast_to(copy, (mesh[0], *copy.shape)) for copy in copies]

    def run(shards: Any, copies: Any) -> Any:
        weights = tuple(Weight(x, leaf, "primary") for x, leaf in zip(shards, leaves, strict=True))
        fresh = to_secondary(beside(weights, tuple(copy.reshape(-1) for copy in copies)))
        return [w.values.reshape(copy.shape) for w, copy in zip(fresh, copies, strict=True)]

    shards = [owned(wire, w) for wire, w in zip(wires, after, strict=True)]
    for i, found in enumerate(on_mesh(mesh, run, shards, held)):
        wanted = wires[i].following_copy(after[i], copies[i])
        same_bits(found, np.broadcast_to(wanted, found.shape))


def test_large_raw_leaves_travel_alone_and_arrive():
    """A leaf of a megabyte is not joined with the others; nor is what is joined disturbed by it."""
    mesh, options = (2, 2), {"weights": "bf16", "local_weights": "bf16", "grads": ("bf16", "fp32")}
    sizes = (3, 4 * (coalesced.ALONE_BYTES // 2), 5)
    leaves, wires = zip(
        *(leaf_and_wire(mesh, size, i, **options) for i, size in enumerate(sizes)), strict=True
    )
    natural, grads = weights_of(wires), grads_of(wires)

    def run(shards: Any, grads: Any) -> Any:
        return gathered(leaves, shards), reduction_of(leaves, "primary").reduce(grads, jnp.uint32(SEED))

    shards = [owned(wire, w) for wire, w in zip(wires, natural, strict=True)]
    whole, sums = on_mesh(mesh, run, shards, grads)
    for i, wire in enumerate(wires):
        same_bits(whole[i], np.broadcast_to(wire.whole(natural[i]).reshape(1, -1), whole[i].shape))
        same_bits(sums[i], wire.two_hops(grads[i], SEED, 1))


@functools.cache
def compiled_round_trip(mesh: tuple[int, int], size: int, fmt: str, block: int) -> Any:
    options = {"weights": fmt, "local_weights": fmt, "grads": (fmt, fmt), "block_size": block, "chunks": 2}
    leaf, wire = leaf_and_wire(mesh, size, **options)

    def device(shard: jax.Array, grad: jax.Array) -> Any:
        (whole,) = gathered([leaf], [shard[0, 0]])
        total = reduction_of([leaf], chunks=2).reduce((grad[0, 0],), jnp.uint32(SEED))[0]
        return whole[None, None], total[None, None]

    spec = PartitionSpec("node", "local")
    mapped = jax.shard_map(
        device, mesh=zerojax.make_mesh(*mesh), in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped), wire


@QUIET
@given(
    shape=st.sampled_from([((2, 3), 500, "int4", 64), ((3, 2), 131, "fp8", 64), ((2, 2), 900, "fp6", 128)]),
    key=st.integers(0, 2**31),
    spread=st.integers(0, 30),
    zeros=st.floats(0, 1),
)
def test_any_values_travel_as_the_reference_says(shape, key, spread, zeros):
    """Blocks of zeros, values of very different sizes next to each other: the shapes stay."""
    run, wire = compiled_round_trip(*shape)
    rng = np.random.default_rng(key)

    def draw(*dims: int) -> np.ndarray:
        scale = 2.0 ** rng.integers(-spread, spread + 1, dims)
        return (rng.standard_normal(dims) * scale * (rng.random(dims) >= zeros)).astype(np.float32)

    w, grads = draw(wire.size), draw(wire.nodes, wire.local, 1, wire.size)
    whole, total = run(owned(wire, w), grads)
    same_bits(np.asarray(whole), np.broadcast_to(wire.whole(w).reshape(1, -1), whole.shape))
    same_bits(np.asarray(total), wire.two_hops(grads, SEED, 2))


@settings(QUIET, max_examples=6)
@given(
    mesh=st.sampled_from([(2, 3), (4, 2), (2, 1), (3, 3)]),
    size=st.integers(1, 700),
    fmt=st.sampled_from(FORMATS),
    block=st.sampled_from([64, 256, 1024]),
)
def test_any_size_on_any_mesh(mesh, size, fmt, block):
    run, wire = compiled_round_trip(mesh, size, fmt, block)
    w, grads = weights_of([wire], size)[0], grads_of([wire], size)[0]
    whole, total = run(owned(wire, w), grads)
    same_bits(np.asarray(whole), np.broadcast_to(wire.whole(w).reshape(1, -1), whole.shape))
    same_bits(np.asarray(total), wire.two_hops(grads, SEED, 2))


def test_salts_are_mixed_as_documented():
    salts = [(), (0,), (1,), (5, 2, 1, 0), (5, 2, 0, 1)]
    found = [int(wire_format.mix(jnp.uint32(SEED), *s)) for s in salts]
    assert found == [mix(SEED, *s) for s in salts]
    assert len(set(found)) == len(found)


def test_padding_never_enters_a_scale():
    """What lies behind a leaf's end is zeros on the wire, so that scales are the elements' alone."""
    leaf, wire = leaf_and_wire((1, 2), 70, grads=("int8", "int8"), block_size=64)
    grads = np.full((1, 2, 1, 70), 1e-3, np.float32)
    (found,) = on_mesh(
        (1, 2), lambda g: reduction_of([leaf], "primary").reduce((g,), jnp.uint32(SEED)), grads
    )
    total = found.transpose(1, 0, 2).reshape(-1)
    # 127 steps reach the block's own maximum; the scale is a bf16 number, good to 1 in 256.
    np.testing.assert_allclose(total[:70], 2e-3, rtol=1 / 256)
    assert not total[70:].any()
    assert wire.shard == 64


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_number_poisons_its_own_block_and_no_other(bad):
    leaf, _ = leaf_and_wire((2, 2), 256, grads=("int8", "int4"), block_size=64)
    grads = np.ones((2, 2, 1, 256), np.float32)
    grads[1, 0, 0, 70] = bad
    (found,) = on_mesh(
        (2, 2), lambda g: reduction_of([leaf], "primary").reduce((g,), jnp.uint32(SEED)), grads
    )
    total = found.transpose(1, 0, 2).reshape(-1)
    assert not np.isfinite(total[64:128]).any()
    np.testing.assert_allclose(np.delete(total, np.s_[64:128]), 4, rtol=0.02)
