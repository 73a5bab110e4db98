"""hlo against programs compiled here for CUDA, whose traffic is known by construction."""

import hlo
import jax
import jax.numpy as jnp
import pytest

NODES, LOCAL = 2, 4
WORLD = NODES * LOCAL
NODE_GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))
LOCAL_GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))


def found(compiled, op):
    return [c for c in hlo.collectives(compiled.as_text()) if c.op == op]


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int4, jnp.bfloat16, jnp.float32])
def test_all_gather_over_each_axis(compile_spmd, dtype):
    """Two hops: 256 elements a device become 512 over node and 2048 over local; sizes by dtype."""

    def two_hops(x):
        return jax.lax.all_gather(jax.lax.all_gather(x, "node", tiled=True), "local", tiled=True)

    compiled = compile_spmd(two_hops, ((256 * WORLD,), dtype), nodes=NODES, local=LOCAL)
    node, local = found(compiled, "all-gather")
    bits = jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).bits
    assert (node.groups, local.groups) == (NODE_GROUPS, LOCAL_GROUPS)
    assert (node.count, local.count) == (1, 1)
    # XLA may view a payload as another type of the same size: bytes are what must agree.
    assert (node.bytes, local.bytes) == (512 * bits // 8, 2048 * bits // 8)
    assert node.sent(LOCAL) == (0, 256 * bits / 8)
    assert local.sent(LOCAL) == (3 * 512 * bits / 8, 0)
    assert node.crosses_nodes(LOCAL)
    assert not local.crosses_nodes(LOCAL)
    assert not node.crosses_nodes(WORLD)


def test_dtype_and_source_are_named(compile_spmd):
    def gather(x):
        with jax.named_scope("weights"):
            return jax.lax.all_gather(x, "node", tiled=True)

    compiled = compile_spmd(gather, ((64 * WORLD,), jnp.bfloat16), nodes=NODES, local=LOCAL)
    (found_gather,) = found(compiled, "all-gather")
    assert (found_gather.dtype, found_gather.elements) == ("bf16", 128)
    assert "weights" in found_gather.source


def test_all_to_all_sends_each_peer_its_part(compile_spmd):
    def exchange(x, y):
        x = jax.lax.all_to_all(x, "node", 0, 0, tiled=True)
        return x, jax.lax.all_to_all(y, ("node", "local"), 0, 0, tiled=True)

    shapes = ((512 * WORLD,), jnp.int8), ((512 * WORLD,), jnp.float32)
    compiled = compile_spmd(exchange, *shapes, nodes=NODES, local=LOCAL)
    by_dtype = {c.dtype: c for c in found(compiled, "all-to-all")}
    assert by_dtype["s8"].sent(LOCAL) == (0, 256)
    # One hop over all eight: 3 peers here and 4 there, 64 elements of 4 bytes each.
    assert by_dtype["f32"].sent(LOCAL) == (3 * 256, 4 * 256)


def test_reduce_scatter_and_all_reduce(compile_spmd):
    def reduce(x):
        scattered = jax.lax.psum_scatter(x, ("node", "local"), tiled=True)
        return scattered, jax.lax.psum(scattered, "local")

    compiled = compile_spmd(reduce, ((512 * WORLD,), jnp.float32), nodes=NODES, local=LOCAL)
    (scatter,) = found(compiled, "reduce-scatter")
    assert (scatter.elements, scatter.bytes) == (512, 2048)
    # A ring over all eight crosses between the nodes twice: at two of its eight senders.
    assert scatter.sent(LOCAL) == (6 / 8 * 1792, 2 / 8 * 1792)
    (total,) = found(compiled, "all-reduce")  # XLA fuses small ones over NVLink into a kernel
    assert total.sent(LOCAL) == (2 * 3 / 4 * 256, 0)


def test_permute_goes_where_its_pairs_say(compile_spmd):
    def shift(x):
        return jax.lax.ppermute(x, ("node", "local"), [(i, (i + 1) % WORLD) for i in range(WORLD)])

    compiled = compile_spmd(shift, ((512 * WORLD,), jnp.int8), nodes=NODES, local=LOCAL)
    (permute,) = found(compiled, "collective-permute")
    assert permute.groups == tuple((i, (i + 1) % WORLD) for i in range(WORLD))
    assert permute.sent(LOCAL) == (6 / 8 * 512, 2 / 8 * 512)


def test_nested_loops_multiply(compile_spmd):
    def nested(x):
        def inner(carry, _):
            wide = jax.lax.all_gather(carry, "node", tiled=True)
            return jnp.tanh(jax.lax.psum_scatter(wide, "node", tiled=True)), None

        def outer(carry, _):
            carry = jax.lax.scan(inner, carry, None, length=3)[0]
            return jnp.sin(jax.lax.ppermute(carry, "local", [(0, 1), (1, 0)])), None

        return jax.lax.scan(outer, x, None, length=5)[0]

    compiled = compile_spmd(nested, ((4096 * WORLD,), jnp.float32), nodes=NODES, local=LOCAL)
    # XLA may peel iterations off a loop and combine them differently: totals are what count.
    for op, count in ("all-gather", 15), ("reduce-scatter", 15), ("collective-permute", 5):
        assert sum(c.count for c in found(compiled, op)) == count, op
    sent = sum(c.sent(LOCAL)[1] for c in hlo.collectives(compiled.as_text()))
    assert sent == 2 * 15 * 4096 * 4


def test_combined_collectives_come_apart(compile_spmd):
    def both(x, y):
        return jax.lax.all_gather((x, y), "local", tiled=True)

    shapes = ((64 * WORLD,), jnp.bfloat16), ((32 * WORLD,), jnp.float32)
    compiled = compile_spmd(both, *shapes, nodes=NODES, local=LOCAL)
    gathers = found(compiled, "all-gather")
    assert sorted((c.dtype, c.bytes) for c in gathers) == [("bf16", 512), ("f32", 512)]
    assert len({c.name for c in gathers}) == 1, "XLA combined them into one"


def test_branches_are_marked(compile_spmd):
    def maybe(x):
        total = jax.lax.psum(x, ("node", "local"))
        return jax.lax.cond(
            total[0] > 0, lambda x: jax.lax.all_gather(x, "node", tiled=True)[: x.size], jnp.sin, x
        )

    compiled = compile_spmd(maybe, ((4096 * WORLD,), jnp.float32), nodes=NODES, local=LOCAL)
    assert [c.conditional for c in found(compiled, "all-gather")] == [True]
    assert [c.conditional for c in found(compiled, "all-reduce")] == [False]


def test_a_loop_of_unknown_length_is_refused(compile_spmd):
    def until(x):
        def body(x):
            return jnp.sin(jax.lax.psum(x, "node"))

        return jax.lax.while_loop(lambda x: x[0] < 3, body, x)

    compiled = compile_spmd(until, ((64 * WORLD,), jnp.float32), nodes=NODES, local=LOCAL)
    with pytest.raises(hlo.HloError, match="trip count"):
        hlo.collectives(compiled.as_text())


def test_overlap_is_seen(compile_spmd):
    """With the latency-hiding scheduler a gather overlaps with an independent product."""

    def independent(x, a):
        return a @ a.T, jax.lax.all_gather(x, "node", tiled=True)

    def dependent(x, a):
        return a @ jax.lax.all_gather(x, "node", tiled=True)[: a.shape[1], None].astype(a.dtype)

    shapes = (((1 << 20) * WORLD,), jnp.int8), ((4096 * WORLD, 4096), jnp.bfloat16)
    compiled = [
        compile_spmd(f, *shapes, nodes=NODES, local=LOCAL, xla_gpu_enable_latency_hiding_scheduler=True)
        for f in (independent, dependent)
    ]
    (hidden,), (exposed,) = (found(c, "all-gather") for c in compiled)
    assert hidden.hides_behind >= 1
    assert exposed.hides_behind == 0


def test_a_matmul_that_writes_into_a_slice_counts(compile_spmd):
    """A gather beside the product of each iteration, which goes straight into its place in a stack."""
    layers, width = 4, 2048

    def stacked(x, a):
        def layer(i, carry):
            stack, x = carry
            stack = jax.lax.dynamic_update_index_in_dim(stack, a @ a.T, i, 0)
            wide = jax.lax.all_gather(x, "node", tiled=True)
            return stack, jnp.sin(wide[: x.size])

        return jax.lax.fori_loop(0, layers, layer, (jax.lax.empty((layers, width, width), a.dtype), x))

    shapes = (((1 << 22) * WORLD,), jnp.float32), ((width * WORLD, width), jnp.bfloat16)
    options = {"xla_gpu_enable_latency_hiding_scheduler": True}
    compiled = compile_spmd(stacked, *shapes, nodes=NODES, local=LOCAL, **options)
    assert "dynamic_slice_fusion" in compiled.as_text()
    (gather,) = found(compiled, "all-gather")
    assert gather.covers == 1


def test_movements_are_told_from_compute(compile_spmd):
    """Each layer's weight is sliced out of the stack (a copy); the tanh of a slice is compute."""
    layers, width = 6, 1024

    def forward(x, w):
        def layer(x, w):
            return jnp.tanh(x @ w.T), x

        return jax.lax.scan(layer, x, w)

    shapes = ((64 * WORLD, width), jnp.bfloat16), ((layers * WORLD, width, width), jnp.bfloat16)
    text = compile_spmd(forward, *shapes, nodes=NODES, local=LOCAL).as_text()
    moves = hlo.movements(text, 64 * width * 2)
    assert all(set(m.ops) <= hlo.MOVES for m in moves)
    assert sum(m.count or 0 for m in moves if "dynamic-update-slice" in m.ops) == layers
    assert {m.bytes for m in moves} <= {64 * width * 2, width * width * 2}
    assert not hlo.movements(text, width * width * 2 + 1)
    assert len(hlo.movements(text, 1, loops_only=False)) >= len(hlo.movements(text, 1))


def test_memory_accounts_for_arguments(compile_spmd):
    compiled = compile_spmd(jnp.sin, ((4096 * WORLD,), jnp.float32), nodes=NODES, local=LOCAL)
    memory = hlo.memory(compiled)
    assert (memory.arguments, memory.outputs, memory.aliased) == (4 * 4096, 4 * 4096, 0)
    assert memory.peak >= 2 * 4 * 4096


def test_not_a_program():
    with pytest.raises(hlo.HloError, match="ENTRY"):
        hlo.collectives("hello")
