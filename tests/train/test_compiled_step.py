"""The real training step, compiled for CUDA clusters without a GPU: what it sends, and in what formats."""

import functools
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import optax
import pytest
from cuda_clusters import check_traffic
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

import zerojax
from zerojax import aot
from zerojax.analysis.plan import plan_state, predict_memory
from zerojax.sharding.memory import HOST, to_device, to_host
from zerojax.train import step
from zerojax.train.memory import host_bytes

WIDTH, LAYERS = 256, 12
ADAM = optax.adamw(1e-3)


class Block(nnx.Module):
    """Two matrices and a vector: each weight has kernels of its own to compile, for each of its hops."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(128, WIDTH, rngs=rngs)
        self.blocks = zerojax.Stack(Block, LAYERS, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 128, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss_fn(model, batch):
    logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def compiled_step(
    zero: zerojax.ZeroConfig, nodes: int, local: int, tx: Any = ADAM
) -> tuple[zerojax.TrainState, dict[str, jax.ShapeDtypeStruct], jax.stages.Compiled]:
    mesh = zerojax.make_mesh(nodes, local, devices=aot.topology(nodes, local, "h100"))
    state = zerojax.TrainState.abstract(Model, tx, loss_fn, mesh=mesh, zero=zero)
    row = jax.ShapeDtypeStruct((nodes * local * zero.accumulate, 128), jnp.int32)
    batch = {"tokens": row, "targets": row}
    return state, batch, zerojax.lower_train_step(state, batch).compile(dict(aot.COMPILER_OPTIONS))


@pytest.mark.parametrize(
    ("preset", "nodes", "local", "dtypes"),
    [
        pytest.param("zero3", 2, 4, {"bf16"}, marks=pytest.mark.slow),
        # Run by test_kernels_in_step.py every time, with the Triton kernels in it.
        pytest.param("zero++-paper", 2, 4, {"u8"}, marks=pytest.mark.slow),
        pytest.param("zero++", 2, 4, {"u8"}, marks=pytest.mark.slow),
        pytest.param("delta", 2, 4, {"u8"}, marks=pytest.mark.slow),
        pytest.param("delta", 64, 8, {"u8"}, marks=pytest.mark.slow),
    ],
)
def test_the_compiled_step_sends_what_the_traced_one_says(cuda_mesh, preset, nodes, local, dtypes):
    """Two counts that share no code agree: of the jaxpr, and of the text of the compiled program."""
    cuda_mesh(nodes, local)  # skips without a compiler
    state, batch, compiled = compiled_step(zerojax.ZeroConfig.preset(preset), nodes, local)
    report = check_traffic(state, batch, compiled, dtypes, own_streams=preset != "zero3")
    memory = hlo.memory(compiled)
    master = 3 * 4 * report.parameters / (nodes * local)  # fp32 weights and Adam's two moments
    assert memory.arguments >= master
    assert memory.aliased >= master, "the state is donated"
    of_norms = hlo.fused_opcodes(str(compiled.as_text()), "jit(_train)/reduce_sum")
    assert "reduce" in of_norms
    assert "dynamic-update-slice" not in of_norms, "the norm's kernels do the last layers' writes again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "dtypes"),
    [("zero3", {"bf16"}), ("delta", {"u8", "bf16"})],  # weights of vectors travel by themselves
)
def test_between_nodes_muon_has_gradients_alone_beside_all_matmuls(cuda_mesh, preset, dtypes):
    cuda_mesh(2, 4)
    zero = zerojax.ZeroConfig.preset(preset)
    state, batch, compiled = compiled_step(zero, 2, 4, zerojax.scale_by_muon())
    report = check_traffic(state, batch, compiled, dtypes, own_streams=preset != "zero3")
    assert {c.axes for c in report.collectives if c.phase == "optimizer"} == {("local",)}
    looped = [c for c in hlo.collectives(str(compiled.as_text())) if c.count > 1 and c.crosses_nodes(4)]
    covers = {(c.op, c.elements, c.covers) for c in looped if "reduce_node" in c.source}
    assert {share for *_, share in covers} == {0.5}, f"of the body, which is of two layers: {covers}"
    held = sum(leaf.count for leaf in state.spec.leaves if leaf.in_every_node)
    assert hlo.memory(compiled).aliased >= 2 * 4 * held / 4, "matrices and their momentum, in each node"


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "again"), [("none", 0), ("full", 1)])
def test_a_product_that_is_kept_is_computed_once(cuda_mesh, remat, again):
    cuda_mesh(1, 1)
    _, _, compiled = compiled_step(zerojax.ZeroConfig(remat=remat), 1, 1)
    # Of two matrices and of the head: forward, and two products backward. With "full" the backward pass of
    # all layers but the last computes `up` again.
    expected = 3 * (2 * LAYERS + 1) + again * (LAYERS - 1)
    assert hlo.products(str(compiled.as_text())) == expected


@pytest.mark.slow
def test_in_breadth_gradients_cross_nodes_beside_a_layers_loop_over_micro_batches(cuda_mesh):
    cuda_mesh(2, 4)
    _, _, compiled = compiled_step(zerojax.ZeroConfig(accumulate=2, accumulate_order="breadth"), 2, 4)
    looped = [
        c for c in hlo.collectives(str(compiled.as_text())) if c.count > 1 and "reduce_node" in c.source
    ]
    assert [c.covers for c in looped] == [0.5, 0.5], "of the body, which is of two layers"


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"accumulate": 4}, marks=pytest.mark.slow),  # a loop of loops
        pytest.param({"accumulate": 4, "stage": 1, "outer_delay": 4}, marks=pytest.mark.slow),
    ],
)
def test_a_fragment_crosses_nodes_beside_all_matmuls_of_the_step(cuda_mesh, fields):
    """With local updates one collective crosses nodes, from before the first product until after the last."""
    cuda_mesh(2, 4)
    state, batch, compiled = compiled_step(zerojax.ZeroConfig.preset("local", **fields), 2, 4)
    text = compiled.as_text()
    assert text is not None
    report, collectives = zerojax.comm_report(state, batch), hlo.collectives(text)
    (crossing,) = (c for c in collectives if c.crosses_nodes(4))
    assert (crossing.op, crossing.dtype, crossing.covers) == ("all-to-all", "u8", 1.0)
    assert crossing.hides_behind > 0
    assert crossing.sent(4)[1] == report.node_bytes == plan_state(state).node_bytes
    within = sum(c.sent(4)[0] for c in collectives)
    assert within == pytest.approx(report.local_bytes, rel=1e-3, abs=256)


@pytest.mark.slow
@pytest.mark.parametrize("host", [("optimizer",), ("optimizer", "weights")])
def test_local_updates_move_layers_and_fragments_of_host_memory(cuda_mesh, host):
    """Never a whole stack, as many bytes as planned, and the exchange is still beside all matmuls."""
    cuda_mesh(2, 4)
    mesh = zerojax.make_mesh(2, 4, devices=aot.topology(2, 4, "h100"))
    zero = zerojax.ZeroConfig.preset("local", host=host)
    state, emulated = (
        zerojax.TrainState.abstract(Model, ADAM, loss_fn, mesh=on, zero=zero)
        for on in (mesh, zerojax.make_mesh(2, 4))
    )
    row = jax.ShapeDtypeStruct((8, 128), jnp.int32)
    batch = step.abstract_batch(state.spec, {"tokens": row, "targets": row})
    arrays, structure = jax.tree.flatten(state)
    away = [x.sharding.memory_kind == HOST for x in jax.tree.leaves(emulated)]
    on_each = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)

    # Described devices have no such inputs: the program allocates them, and returns an element of each.
    def allocated(x):
        def empty():
            return to_host(lax.empty(x.sharding.shard_shape(x.shape), x.dtype))

        return on_each(empty, in_specs=(), out_specs=x.sharding.spec)()

    def element(x, like):
        def first(x):
            return to_device(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim)).reshape(1)

        return on_each(first, in_specs=like.sharding.spec, out_specs=PartitionSpec(("node", "local")))(x)

    def run(here, batch):
        given = iter(here)
        every = [allocated(x) if there else next(given) for x, there in zip(arrays, away, strict=True)]
        after, metrics = step._train(structure.unflatten(every), {"frozen": {}, "replicas": {}}, batch)
        results = zip(jax.tree.leaves(after), arrays, away, strict=True)
        return [element(x, like) if there else x for x, like, there in results], metrics

    here = [x for x, there in zip(arrays, away, strict=True) if not there]
    jitted = jax.jit(run, donate_argnums=0, compiler_options=step._compiler_options(state.spec))
    compiled = jitted.lower(here, batch).compile(dict(aot.COMPILER_OPTIONS))
    text, memory = str(compiled.as_text()), compiled.memory_analysis()
    assert memory is not None
    assert memory.host_temp_size_in_bytes == host_bytes(emulated)
    replicas = hlo.host_copies(text)
    layer = 4 * 2 * WIDTH * WIDTH // 4
    assert max(copy.bytes for copy in replicas) == layer
    assert all(copy.by_dma for copy in replicas if copy.count > 1)
    (crossing,) = (c for c in hlo.collectives(text) if c.crosses_nodes(4))
    assert (crossing.op, crossing.covers) == ("all-to-all", 1.0)
    held = predict_memory(emulated.spec).host
    fragment = sum(held[kind] for kind in ("parameters", "outer", "residual")) / zero.every
    updated, sent = held["parameters"] + held["optimizer"], held.get("encoded", 0)
    for leaving, planned in ((True, updated + fragment + sent), (False, updated + 3 * fragment + 2 * sent)):
        moved = sum(copy.bytes * copy.count for copy in replicas if copy.to_host == leaving)
        assert moved == pytest.approx(planned, rel=0.1)
