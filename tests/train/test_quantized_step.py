"""What a quantized step promises: reproducible, unbiased, the same weights both ways, copies that agree."""

import collections
import functools
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES, WIDTH, Case, regression_batch, slope_case, slope_loss, squared_error
from flax import nnx
from plain_loop import by_path
from wire_reference import Wire

import zerojax

ROWS = 24
SR = {"grads": ("int8", "int4"), "block_size": 64, "rounding": "stochastic", "rotation": 32}
DELTA = {
    **SR,
    "weights": "int4",
    "hpz": True,
    "weights_delta": True,
    "grad_sync": "step",
    "accumulate": 3,
    "local_weights": "bf16",
}
PLAIN = {"rounding": "nearest", "rotation": 0}
"""Where a test is of weights: the other options of gradients are half of a compile."""


def weights_after(seed: int, steps: int, **zero: Any) -> bytes:
    case = CASES["stack"]
    state = case.create(optax.adam(1e-2), nodes=2, local=2, seed=seed, **zero)
    for batch in case.batches(ROWS, steps):
        state, _ = zerojax.train_step(state, batch)
    return b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state.params))


@pytest.mark.slow
def test_stochastic_rounding_is_the_same_twice():
    first = weights_after(3, 3, **DELTA)
    assert first == weights_after(3, 3, **DELTA)


def slopes(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    return {"slope": rng.standard_normal((rows, 192)).astype(np.float32)}


SLOPE = slope_case(192, slopes)


@functools.cache
def updates(seed: int, rounding: str, steps: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Each step's update, [steps, 192], from the same batch, and the exact one."""
    zero = {**SR, "rounding": rounding, "grads": ("int4", "int4"), "rotation": 0}
    state = SLOPE.create(optax.sgd(1.0), nodes=2, local=2, seed=seed, **zero)
    (batch,) = SLOPE.batches(8, 1)
    history = [np.zeros(192, np.float32)]
    for _ in range(steps):
        state, _ = zerojax.train_step(state, batch)
        history.append(np.asarray(zerojax.gather_params(state)["w"][0]))
    return -np.diff(history, axis=0), batch["slope"].mean(0)


def test_stochastic_rounding_is_unbiased_through_a_step():
    found, exact = updates(0, "stochastic")
    assert len(np.unique(found, axis=0)) == len(found), "every step draws its own bits"
    spread = found.std(0).mean()
    # 192 means of 64 draws: their errors are 1/8 of the spread, and their mean another 1/14 of that.
    error = found.mean(0) - exact
    assert 0.5 < np.sqrt((error**2).mean()) / (spread / 8) < 2
    assert abs(error.mean()) < 4 * spread / 8 / np.sqrt(192)
    # Rounding to nearest makes the same error every time: it does not average out.
    nearest, _ = updates(0, "nearest", 8)
    assert np.sqrt(((nearest.mean(0) - exact) ** 2).mean()) > 2 * np.sqrt((error**2).mean())


def test_seeds_leaves_steps_and_devices_draw_different_bits():
    found, _ = updates(0, "stochastic")
    other, _ = updates(1, "stochastic", 4)
    assert not (found[:4] == other).all(1).any()


class SlopeBlock(nnx.Module):
    """Two weights of the same gradient, which is the same in every layer."""

    def __init__(self, *, rngs: nnx.Rngs):
        del rngs
        self.a, self.b = nnx.Param(jnp.zeros((1, 192))), nnx.Param(jnp.zeros((1, 192)))

    def __call__(self, x, slope):
        return x + slope @ self.a[0] + slope @ self.b[0]


class SlopeStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.stack = zerojax.Stack(SlopeBlock, 4, rngs=rngs)

    def __call__(self, slope):
        return self.stack(jnp.zeros(len(slope)), slope)


@pytest.mark.parametrize(
    ("grads", "rounding"),
    [
        (("int4", "fp32"), "stochastic"),
        (("fp32", "int4"), "stochastic"),
        (("fp32", "int4"), "nearest"),
        pytest.param(("int4", "fp32"), "nearest", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_leaves_and_layers_draw_bits_of_their_own(grads, rounding):
    """On either hop; to nearest, eight equal gradients stay equal."""
    case = Case(SlopeStack, slope_loss, (), slopes)
    zero = {"grads": grads, "block_size": 64, "rounding": rounding}
    state = case.begin(optax.sgd(1.0), nodes=2, local=2, **zero)
    state, _ = zerojax.train_step(state, case.batches(8, 1)[0])
    rows = np.concatenate([x[:, 0] for x in by_path(zerojax.gather_params(state)).values()])
    assert rows.shape == (8, 192)
    assert len(np.unique(rows, axis=0)) == (8 if rounding == "stochastic" else 1)


def replicas_of(state: zerojax.TrainState) -> dict[tuple[str, ...], jax.Array]:
    """Delta's copies by path."""
    return {path: copy.values for path, copy in state.replicas.items()}


def secondary_hashes(state: zerojax.TrainState) -> dict[tuple[str, int], set[str]]:
    """Hashes of each local device's part of each copy, over all nodes."""
    found = collections.defaultdict(set)
    devices = state.spec.mesh.devices
    local_of = {device: lane for row in devices for lane, device in enumerate(row)}
    for path, copy in replicas_of(state).items():
        for shard in copy.addressable_shards:
            digest = hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
            found["/".join(path), local_of[shard.device]].add(digest)
    return found


def as_blocks(x: Any, leaf: Any, world: Any) -> list[np.ndarray]:
    """A stored or a secondary array as one [local, nodes, shard] a layer."""
    flat = np.asarray(x).reshape(leaf.layers, world.local, world.nodes, leaf.shard)
    return list(flat)


@pytest.mark.parametrize("fmt", ["int4", pytest.param("fp8", marks=pytest.mark.slow)])
def test_delta_copies_agree_follow_the_masters_and_know_their_bound(fmt):
    """After each step: one hash over all nodes, the reference's bits, within half a code of the master.

    The last step is a resync, which sends the whole weights.
    """
    case, mesh = CASES["stack"], (3, 2)
    state = case.begin(optax.adam(1e-2), nodes=3, local=2, **{**DELTA, "weights": fmt, "delta_resync": 3})
    spec, world = state.spec, state.spec.world
    top = {"int4": 7, "fp8": 448}[fmt]
    half_code = {"int4": 0.5, "fp8": 16}[fmt]
    for step, batch in enumerate(case.batches(36, 4)):
        masters = {path: np.asarray(x) for path, x in by_path(state.params).items()}
        replicas = {path: np.asarray(x) for path, x in replicas_of(state).items()}
        state, _ = zerojax.train_step(state, batch)
        assert {len(hashes) for hashes in secondary_hashes(state).values()} == {1}
        moved = replicas_of(state)
        for leaf in spec.leaves:
            node, local = (codec.fmt for codec in leaf.weights)
            wire = Wire(*mesh, leaf.size, (node, local), ("fp32", "fp32"), 64, leaf.shard)
            layers = zip(
                as_blocks(masters[leaf.path], leaf, world),
                as_blocks(replicas[leaf.path], leaf, world),
                as_blocks(moved[leaf.path], leaf, world),
                strict=True,
            )
            for master, before, after in layers:
                if step == 3:
                    np.testing.assert_array_equal(after, master.astype(after.dtype))
                    continue
                natural = master.reshape(-1)[: leaf.size]
                np.testing.assert_array_equal(after, wire.following_copy(natural, before))
                if node != fmt or step == 0:
                    continue
                gap = np.abs(master - before.astype(np.float32)).reshape(-1, 64)
                bound = gap.max(1, keepdims=True) / top * half_code * 1.01
                stored = np.abs(master).reshape(-1, 64) * 2.0**-8
                left = np.abs(master - after.astype(np.float32)).reshape(-1, 64)
                assert (left <= bound + stored + 1e-30).all(), leaf.name
                assert left.sum() < 0.9 * gap.sum() or gap.max() < stored.max()


def test_evaluation_sees_the_weights_of_now():
    """A copy from before the last update must not be what is evaluated."""
    case = CASES["stack"]
    exact = {"weights": "fp32", "local_weights": "fp32", "hpz": True, "weights_delta": True}
    state = case.begin(optax.sgd(0.05), nodes=2, local=2, **exact)
    batch = case.batches(ROWS, 1)[0]
    state, _ = zerojax.train_step(state, batch)
    state, metrics = zerojax.train_step(state, batch)
    now = zerojax.eval_step(state, batch)["loss"]
    model = zerojax.gather_model(state)
    np.testing.assert_allclose(now, squared_error(model, batch), rtol=1e-5)
    assert abs(now - metrics["loss"]) > 1e-3


SEEN: list[tuple[str, int, str]] = []


def note(when: str, device: Any, w: Any) -> None:
    SEEN.append((when, int(device), hashlib.sha256(np.asarray(w).tobytes()).hexdigest()))


@jax.custom_vjp
def spied(w: jax.Array) -> jax.Array:
    """The same weight; every use of it is noted, forward and backward."""
    jax.debug.callback(functools.partial(note, "forward"), jax.lax.axis_index(("node", "local")), w)
    return w


def spied_forward(w: jax.Array) -> tuple[jax.Array, jax.Array]:
    return spied(w), w


def spied_backward(w: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    jax.debug.callback(functools.partial(note, "backward"), jax.lax.axis_index(("node", "local")), w)
    return (cotangent,)


spied.defvjp(spied_forward, spied_backward)


class Spied(nnx.Module):
    """A unit that notes the bits of its weight."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 3)

    def __call__(self, x):
        return jnp.tanh(x @ spied(self.w[...]))


class SpiedModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block = Spied(rngs=rngs)

    def __call__(self, x):
        return self.block(x)[:, :1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "int4", "block_size": 64},
        {"weights": "int8", "hpz": True, "local_weights": "int4", "grads": ("int8", "int4")},
        {"weights": "int4", "hpz": True, "weights_delta": True, "local_weights": "bf16"},
    ],
    ids=["exact", "qwZ", "qwZ + hpZ", "delta"],
)
def test_forward_and_backward_of_a_step_use_the_same_bits(options):
    case = Case(SpiedModel, squared_error, (Spied,), regression_batch)
    state = case.begin(optax.sgd(0.5), nodes=2, local=2, **options)
    for batch in case.batches(ROWS, 2):
        SEEN.clear()
        state, _ = zerojax.train_step(state, batch)
        jax.block_until_ready(state.params)
        jax.effects_barrier()
        assert {when for when, _, _ in SEEN} == {"forward", "backward"}
        assert {device for _, device, _ in SEEN} == {0, 1, 2, 3}
        assert len({bits for _, _, bits in SEEN}) == 1


def test_no_weight_or_gradient_crosses_nodes_wider_than_asked():
    """Vectors travel in the compute format; every matrix of a unit as bytes."""
    state = CASES["stack"].abstract(
        optax.sgd(0.1), nodes=2, local=2, **{**DELTA, **PLAIN, "compute_dtype": "bfloat16"}
    )
    for leaf in state.spec.leaves:
        wanted = ("int4", "int8", "int4") if len(leaf.shape) > 1 else ("bf16", "bf16", "bf16")
        assert (leaf.weights.node.fmt, leaf.grads.local.fmt, leaf.grads.node.fmt) == wanted


@pytest.mark.parametrize(
    "preset",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("zero3", "zero++")), "delta", "local"],
)
def test_a_step_promotes_no_ranks_for_the_user(preset):
    """``jax_numpy_rank_promotion="raise"`` finds the user's own, and none of zerojax's."""
    case = CASES["stack"]
    batch = case.batches(8, 1)[0]

    def promoting(model: Any, batch: Any) -> Any:
        return case.loss(model, batch) + jnp.sum(batch["x"] + jnp.ones(batch["x"].shape[1]))

    def lower(loss: Any) -> Any:
        zero = zerojax.ZeroConfig.preset(preset)
        mesh = zerojax.make_mesh(2, 2)
        state = zerojax.TrainState.abstract(case.model, optax.sgd(0.1), loss, mesh=mesh, zero=zero)
        return zerojax.lower_train_step(state, batch)

    with jax.numpy_rank_promotion("raise"):
        lower(case.loss)
        with pytest.raises(ValueError, match="rank_promotion"):
            lower(promoting)
