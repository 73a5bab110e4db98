"""Frozen weights: they stay as they are, cost no gradient and cross no nodes; the others train as ever."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES
from flax import traverse_util
from plain_loop import by_path, distance, masters, plain_loop, plain_model

import zerojax
from zerojax import ZeroError
from zerojax.train.frozen import encode_frozen

MESHES = [(1, 1), (2, 4), (3, 2)]
UP, DENSE = ("*up*", "!*bias"), ("*dense_0*", "!*bias")
SGD = optax.sgd(0.1)  # one for all, which is checked once with each model


def frozen_up(params):
    """A label for each leaf, for the reference: what ``UP`` or ``DENSE`` matches is frozen."""
    labels = {
        path: "frozen" if ("up" in path or "Dense_0" in path) and path[-1] == "kernel" else "trained"
        for path in by_path(params)
    }
    return traverse_util.unflatten_dict(labels)


@functools.cache
def wanted(name: str):
    """Losses and weights of a plain loop whose optimizer does not change the frozen weights."""
    tx = optax.multi_transform({"trained": SGD, "frozen": optax.set_to_zero()}, frozen_up)
    return plain_loop(plain_model(name), tx, CASES[name].batches(24, 4))


def states(name: str, nodes: int, local: int, steps: int = 4, **zero):
    """The states before and after some steps, and the losses."""
    case = CASES[name]
    options: dict[str, Any] = {"frozen": DENSE if case.linen else UP, **zero}
    first = state = case.create(SGD, nodes=nodes, local=local, **options)
    losses = []
    for batch in case.batches(24, steps):
        kept = jax.tree.map(np.asarray, state.frozen)
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        jax.tree.map(np.testing.assert_array_equal, state.frozen, kept)
    return first, state, losses


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("stack", (1, 1)), ("linen", (3, 2))]
    + [
        pytest.param(name, mesh, marks=pytest.mark.slow)
        for name, mesh in [
            ("nnx", (2, 4)),
            ("stack", (2, 4)),
            ("linen-scan", (2, 4)),
            ("nnx", (3, 2)),
            ("stack", (3, 2)),
            ("linen", (2, 4)),
            ("linen-scan", (3, 2)),
        ]
    ],
)
def test_the_others_train_as_beside_an_optimizer_that_leaves_them_out(name, mesh):
    losses, weights = wanted(name)
    _, state, found = states(name, *mesh)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    assert distance(zerojax.gather_params(state), weights) < 1e-6
    assert not {path for path in by_path(masters(state)) if "up" in path and path[-1] == "kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero++", "delta"])
def test_the_presets_train_beside_frozen_weights(preset):
    losses, _ = wanted("stack")
    options = zerojax.ZeroConfig.preset(preset)
    changed = {name: getattr(options, name) for name in ("weights", "weights_delta", "hpz", "grads")}
    _, _, found = states("stack", 2, 4, grad_sync=options.grad_sync, **changed)
    np.testing.assert_allclose(found, losses, rtol=0.1)


def report_of(**zero):
    case = CASES["stack"]
    state = case.abstract(SGD, nodes=2, local=4, **zero)
    return zerojax.comm_report(state, case.batches(24, 1)[0])


def test_frozen_weights_never_cross_nodes():
    every, none = report_of(), report_of(frozen=("*", "!last*"))
    assert none.between_nodes < every.between_nodes / 10
    last = 6 + 1  # the only weights that are trained
    sent = {one.phase: one.elements for one in none.collectives if one.node_bytes and one.phase != "metrics"}
    assert len(sent) == 2
    assert all(elements <= 2 * 8 * last for elements in sent.values()), sent


@pytest.mark.parametrize(
    "fmt", ["nf4", *(pytest.param(fmt, marks=pytest.mark.slow) for fmt in ("bf16", "fp8", "int8", "int4"))]
)
def test_every_format_is_stored_once_per_node_and_decoded_with_its_own_error(fmt):
    create = functools.partial(CASES["stack"].create, SGD, nodes=2, local=4, frozen=("*up*",))
    exact, state = create(), create(frozen_weights=fmt, block_size=64, precise=())
    for x in jax.tree.leaves(state.frozen):
        places = {(str(shard.index), shard.device.id // 4) for shard in x.addressable_shards}
        assert len(places) == 8  # each node has all of it,
        assert len({index for index, _ in places}) == 4  # spread over its devices
    whole, stored = (by_path(zerojax.gather_params(s)) for s in (exact, state))
    errors = {"bf16": 2**-8, "fp8": 0.04, "int8": 0.01, "int4": 0.15, "nf4": 0.12}
    for path, values in whole.items():
        apart = np.linalg.norm(stored[path] - values) / max(np.linalg.norm(values), 1)
        assert apart <= (errors[fmt] if path[-2:] == ("up", "kernel") else 0), path
    _, metrics = zerojax.train_step(state, CASES["stack"].batches(24, 1)[0])
    assert float(metrics["loss"]) == pytest.approx(wanted("stack")[0][0], rel=0.1)


@pytest.mark.slow
def test_the_fingerprint_is_of_the_values_alone():
    found = [states("stack", *mesh, steps=0, frozen_weights=fmt)[0] for mesh, fmt in
             [((1, 1), None), ((2, 4), "int8"), ((3, 2), None)]]  # fmt: skip
    assert len({int(state.base["fingerprint"]) for state in found}) == 1
    other = CASES["stack"].create(SGD, nodes=1, local=1, seed=1, frozen=UP)
    assert int(other.base["fingerprint"]) != int(found[0].base["fingerprint"])
    spec, leaf = found[0].spec, found[0].spec.frozen[0]
    values = jnp.arange(leaf.count, dtype=jnp.float32).reshape(leaf.unsharded_shape)
    hashes = [int(encode_frozen(spec, leaf, x)[1]) for x in (values, values[..., ::-1])]
    assert hashes[0] != hashes[1]  # and of their order


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"frozen": ("*",)}, "leaves nothing to train"),
        ({"frozen": ("*upp*",)}, "matches no parameter"),
        ({"frozen": UP, "stage": 2}, "use stage 3"),
        ({"frozen": UP, "frozen_weights": "int3"}, "is not one of"),
        ({"frozen_weights": "int8"}, "name them in frozen"),
    ],
)
def test_what_cannot_be_is_refused_in_words(options, words):
    with pytest.raises(ZeroError, match=words.replace("*", r"\*")):
        CASES["stack"].create(SGD, nodes=1, local=1, **options)


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        pytest.param("stack", (2, 4), {"frozen_weights": "nf4"}, marks=pytest.mark.slow),
        pytest.param("nnx", (3, 2), {}, marks=pytest.mark.slow),
        pytest.param("stack", (3, 2), {"frozen_weights": "int8"}, marks=pytest.mark.slow),
        pytest.param("linen-scan", (2, 4), {"frozen_weights": "int8"}, marks=pytest.mark.slow),
        pytest.param("nnx", (2, 4), {"frozen_weights": "int4"}, marks=pytest.mark.slow),
    ],
)
def test_weights_spread_over_the_world_change_no_bit(name, mesh, options):
    options = {"block_size": 64, "precise": (), **options}
    near, far = (
        states(name, *mesh, steps=3, frozen_spread=spread, **options) for spread in ("node", "world")
    )
    assert near[2] == far[2]
    stored = (jax.tree.leaves(state.frozen) for state in (near[1], far[1]))
    jax.tree.map(np.testing.assert_array_equal, *stored)
    jax.tree.map(np.testing.assert_array_equal, near[1].base, far[1].base)
    jax.tree.map(np.testing.assert_array_equal, near[1].params, far[1].params)
    for x in jax.tree.leaves(far[0].frozen):
        assert sum(shard.data.nbytes for shard in x.addressable_shards) == x.nbytes  # once in all


def test_what_weights_spread_over_the_world_send_and_take_is_as_planned():
    options = {"frozen": UP, "frozen_weights": "int8", "block_size": 64, "precise": ()}
    case = CASES["stack"]
    near, far = (
        case.abstract(SGD, nodes=2, local=4, frozen_spread=spread, **options) for spread in ("node", "world")
    )
    sent = [zerojax.comm_report(state, case.batches(24, 1)[0]) for state in (near, far)]
    planned = [zerojax.plan.plan_state(state) for state in (near, far)]
    (leaf,) = far.spec.frozen
    # In three layers forward; backward in two, since the last is still there.
    assert sent[1].node_bytes - sent[0].node_bytes == 5 * leaf.weights.node.row_bytes(leaf.shard)
    assert planned[1].node_bytes - planned[0].node_bytes == 5 * leaf.weights.node.row_bytes(leaf.shard)
    assert sent[1].local_bytes == sent[0].local_bytes
    frozen = [plan.memory.kinds["frozen"] for plan in planned]
    assert frozen[0] == 2 * frozen[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "and none are: name them in frozen"),
        ({"frozen": ("*",), "hpz": True}, "hpz keeps a copy of gathered weights in each"),
        ({"frozen": ("*",), "frozen_spread": "pod"}, "is not one of"),
    ],
)
def test_a_spread_that_cannot_be_is_refused(options, words):
    with pytest.raises(ZeroError, match=words):
        zerojax.ZeroConfig(**{"frozen_spread": "world"} | options)
