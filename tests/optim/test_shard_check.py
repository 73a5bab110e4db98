"""Optimizers that are right on shards give what they give on whole leaves; the others are refused."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES
from flax import traverse_util
from jax.sharding import NamedSharding
from optax import contrib
from plain_loop import by_path, distance, masters, plain_loop, plain_model

import zerojax
from zerojax.optim import shard_check
from zerojax.optim.shard_check import OnLayout, check_shardable, on_shards
from zerojax.sharding.layout import OWNED, ParamShape, make_layout
from zerojax.sharding.mesh import MeshShape

ROWS = 24


def leaves() -> tuple[Any, ...]:
    """A vector, a matrix, a stacked matrix, a scalar, and one without elements."""
    zero, world = zerojax.ZeroConfig(), MeshShape(2, 4)
    shapes = [(("norm", "scale"), (200,), ()), (("up", "kernel"), (200, 300), ())]
    shapes += [(("blocks", "kernel"), (200, 130), (3,)), (("gain",), (), ()), (("none",), (0, 3), ())]
    return tuple(
        make_layout(ParamShape(path, shape, "float32", stack), index=i, world=world, zero=zero)
        for i, (path, shape, stack) in enumerate(shapes)
    )


def label(params: Any) -> Any:
    """ "frozen" for kernels, "free" for the rest."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "frozen" if "kernel" in jax.tree_util.keystr(path) else "free", params
    )


WARM_UP = optax.warmup_cosine_decay_schedule(0.0, 1e-4, 1000, 10_000)
GOOD = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-2),
    "adamw, masked decay": lambda: optax.adamw(
        1e-2, mask=functools.partial(jax.tree.map, lambda x: x.ndim > 1)
    ),
    "lion": lambda: optax.lion(1e-3),
    "nadamw": lambda: optax.nadamw(1e-2),
    "adopt": lambda: contrib.adopt(1e-2),
    "averaged": lambda: optax.chain(optax.adam(1e-2), zerojax.average_weights(0.9)),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "lars": lambda: optax.lars(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "adagrad": lambda: optax.adagrad(1e-2),
    "radam": lambda: optax.radam(1e-2),
    "clip_by_global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "multi_transform": lambda: optax.multi_transform(
        {"free": optax.adam(1e-2), "frozen": optax.set_to_zero()}, label
    ),
    "masked": lambda: optax.masked(optax.adam(1e-2), functools.partial(jax.tree.map, lambda x: x.ndim > 1)),
    "multi steps": lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
    "warming up": lambda: optax.adamw(WARM_UP),
    "many steps": lambda: optax.MultiSteps(optax.adam(1e-2), 20).gradient_transformation(),
    "tree norms": lambda: contrib.prodigy(1.0),
}

BAD = {
    "adafactor, warming up": lambda: optax.adafactor(WARM_UP),
    "muon, warming up": lambda: contrib.muon(WARM_UP),
    "adafactor, accumulated": lambda: optax.MultiSteps(optax.adafactor(1e-2), 5).gradient_transformation(),
    "centralized, small": lambda: optax.chain(optax.centralize(), optax.sgd(1e-7)),
    "adafactor": lambda: optax.adafactor(1e-2),
    "factored": lambda: optax.chain(optax.scale_by_factored_rms(), optax.scale(-1e-2)),
    "muon": lambda: contrib.muon(1e-2),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "clip_by_block_rms": lambda: optax.chain(optax.clip_by_block_rms(0.1), optax.sgd(0.1)),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)),
    "centralized": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "sm3": lambda: optax.sm3(1e-2),
}


COMPARED = ("adopt", "averaged", "lamb", "lars", "apply_if_finite", "tree norms")
"""The transforms whose updates are compared, because no proof covers them."""


@pytest.mark.parametrize("name", GOOD)
def test_what_works_leaf_by_leaf_is_taken(name, monkeypatch):
    if name not in COMPARED:
        monkeypatch.setattr(shard_check, "_compare_updates", None)  # a call would fail
    check_shardable(GOOD[name](), leaves())


def of_a_function(function: Any) -> optax.GradientTransformation:
    """The transform that applies a function to each leaf's gradient and weight."""
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates, params))


UNPROVED = {
    "moves padding": lambda g, w: g + 1e-3,
    "divides zero by zero": lambda g, w: g / jnp.abs(g),
    "multiplies zero by infinity": lambda g, w: g * (1 / w),
    "reverses": lambda g, w: g[::-1],
    "transposes": lambda g, w: g.T.reshape(g.shape),
    "sums an axis": lambda g, w: g * jnp.sum(g, axis=0, keepdims=True),
    "sums what padding has": lambda g, w: g * jnp.sum(jnp.cos(g)),
    "sums rows so far": lambda g, w: jax.lax.scan(lambda c, x: (c + x, c + x), jnp.zeros_like(g[0]), g)[1],
    "takes columns first": lambda g, w: jax.lax.reshape(g, g.shape, (1, 0)),
    "pairs rows": lambda g, w: g * jnp.sum(g[:, None] * g),
    "counts places": lambda g, w: g * jnp.arange(g.size, dtype=g.dtype).reshape(g.shape),
    "branches by an element": lambda g, w: jax.lax.cond(g.reshape(-1)[0] > 0, jnp.negative, jnp.sin, g),
    "chooses padding": lambda g, w: jnp.where(jnp.sum(g) > 0, 1.0, g),
    "may multiply zero by infinity": lambda g, w: g * jnp.where(jnp.sum(g) > 0, 1 / w, w),
}


@pytest.mark.parametrize("name", UNPROVED)
def test_what_no_proof_covers_is_compared(name, monkeypatch):
    compared = []
    monkeypatch.setattr(shard_check, "_compare_updates", lambda *_: compared.append(True))
    with contextlib.suppress(zerojax.ZeroError):
        check_shardable(of_a_function(UNPROVED[name]), leaves()[1:2])
    assert compared


def test_moments_are_followed_over_all_steps(monkeypatch):
    """The first two updates leave padding alone, and the third does not."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        first, second = state
        return jax.tree.map(jnp.add, updates, second), (jax.tree.map(jnp.ones_like, first), first)

    compared = []
    monkeypatch.setattr(shard_check, "_compare_updates", lambda *_: compared.append(True))
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    check_shardable(optax.GradientTransformation(lambda params: (zeros(params),) * 2, update), leaves()[:1])
    assert compared


def test_the_exponent_counts_as_an_operation():
    tx = of_a_function(lambda g, w: g ** (2 if g.ndim == 2 and g.shape[1] == 1 else 3))
    with pytest.raises(zerojax.ZeroError, match="depends on the leaf's shape"):
        check_shardable(tx, leaves()[1:2])


@pytest.mark.parametrize("name", BAD)
def test_what_depends_on_a_leafs_shape_is_refused(name):
    with pytest.raises(
        zerojax.ZeroError,
        match=r"(depends on the leaf's shape|can't work on sharded leaves|draws random numbers)",
    ) as e:
        check_shardable(BAD[name](), leaves()[:3])
    assert ("draws" in str(e.value)) == (name == "noise")
    assert any(repr("/".join(leaf.path)) in str(e.value) for leaf in leaves())
    assert "Use a transform that works element by element" in str(e.value).replace("\n", " ")


def test_a_mask_that_tells_scalars_from_vectors_is_refused():
    tx = optax.adamw(1e-2, mask=functools.partial(jax.tree.map, lambda x: x.ndim == 1))
    with pytest.raises(zerojax.ZeroError, match=r"'gain' depends .* A scalar is stored as a vector"):
        check_shardable(tx, leaves())


def test_what_one_model_allows_is_asked_again_of_another():
    tx = BAD["factored"]()
    for _ in range(2):
        check_shardable(tx, leaves()[:1])  # a vector has no factors
        with pytest.raises(zerojax.ZeroError, match=r"up/kernel.*depends on the leaf's shape"):
            check_shardable(tx, leaves()[:2])


@pytest.mark.parametrize(
    "chosen", [lambda x: x.shape[-1] != 300, lambda x: x.shape[0] != 200], ids=["last side", "first side"]
)
def test_a_mask_by_sizes_is_refused(chosen):
    """The probe's leaves have none of these sizes, and neither have stored ones."""
    tx = optax.adamw(1e-2, mask=functools.partial(jax.tree.map, chosen))
    with pytest.raises(zerojax.ZeroError, match="a mask that goes by sizes of leaves"):
        check_shardable(tx, leaves()[1:3])


def by_ndim(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels_by_ndim(params: Any) -> Any:
    """Plain optax has no third kind of leaf for a stacked matrix."""
    return jax.tree.map(lambda x: {0: "vector", 1: "vector", 2: "matrix"}[x.ndim], params)


AS_IT_IS = OnLayout(lambda mesh, leaves, zero: optax.identity())
BY_NDIM = {
    "decay": lambda first: optax.chain(
        optax.clip_by_global_norm(0.3), optax.adamw(1e-2, weight_decay=1.0, mask=by_ndim)
    ),
    "rates": lambda first: optax.multi_transform(
        {"vector": optax.sgd(0.1), "matrix": optax.sgd(0.2)}, labels_by_ndim
    ),
    "frozen": lambda first: optax.chain(optax.sgd(0.1), optax.masked(optax.set_to_zero(), by_ndim)),
    "chained": lambda first: zerojax.chain(
        first, optax.add_decayed_weights(1.0, mask=by_ndim), optax.scale(-1e-2)
    ),
}


@pytest.mark.parametrize(
    ("name", "stage"), [("decay", 3), ("decay", 0), ("rates", 3), ("frozen", 3), ("chained", 3)]
)
def test_masks_see_the_ndim_of_a_layer(name, stage):
    """A stack of three layers is updated like three layers of a list, and nothing is sent for it."""
    mesh, zero = zerojax.make_mesh(2, 4), zerojax.ZeroConfig(stage=stage)
    stacked = {("blocks", "scale"): (5,), ("blocks", "kernel"): (5, 6), ("blocks", "gain"): ()}
    shapes = [ParamShape(path, shape, "float32", (3,)) for path, shape in stacked.items()]
    shapes.append(ParamShape(("head", "kernel"), (6, 3), "float32", ()))
    laid_out = [
        make_layout(shape, index=i, world=MeshShape(2, 4), zero=zero) for i, shape in enumerate(shapes)
    ]
    rng = np.random.default_rng(0)
    params, *grads = (
        {leaf.path: rng.standard_normal(leaf.unsharded_shape).astype(np.float32) for leaf in laid_out}
        for _ in range(3)
    )

    def stored(values: Any) -> Any:
        result = {}
        for leaf in laid_out:
            rows = values[leaf.path].reshape(leaf.layers, -1)
            padded = np.pad(rows, ((0, 0), (0, leaf.padded - leaf.size))).reshape(leaf.stored_shape)
            place = NamedSharding(mesh, leaf.spec(OWNED if stage else ()))
            result[leaf.path] = jax.device_put(padded, place)
        return traverse_util.unflatten_dict(result)

    def listed(values: Any) -> Any:
        layers = [{path[-1]: values[path][layer] for path in stacked} for layer in range(3)]
        return {"blocks": layers, "head": values["head", "kernel"]}

    tx, found = on_shards(BY_NDIM[name](AS_IT_IS), mesh, laid_out, zero), stored(params)
    state = jax.jit(tx.init)(found)
    assert {x.shape for x in jax.tree.leaves(state)} <= {(), *(leaf.stored_shape for leaf in laid_out)}

    def plain_updates(tx: Any) -> Any:
        state, wanted = tx.init(listed(params)), listed(params)
        for grad in grads:
            updates, state = tx.update(listed(grad), state, wanted)
            wanted = optax.apply_updates(wanted, updates)
        return wanted

    def step(found: Any, state: Any, grad: Any) -> Any:
        updates, state = tx.update(grad, state, found)
        return optax.apply_updates(found, updates), state

    compiled = jax.jit(step).lower(found, state, stored(grads[0])).compile()
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert moved not in str(compiled.as_text())
    for grad in grads:
        found, state = compiled(found, state, stored(grad))
    whole = {
        leaf.path: np.asarray(by_path(found)[leaf.path])
        .reshape(leaf.layers, -1)[:, : leaf.size]
        .reshape(leaf.unsharded_shape)
        for leaf in laid_out
    }
    wanted = jax.jit(lambda: plain_updates(BY_NDIM[name](optax.identity())))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), listed(whole), wanted)


@pytest.mark.parametrize("name", ["masked sizes", "masked shapes"])
def test_what_a_layers_ndim_lets_through_is_checked_as_a_layer(name):
    """Neither does anything to a stack as a whole."""
    chosen, tx = {
        "masked sizes": (lambda x: x.ndim == 2 and x.shape[-1] == 130, optax.sgd(0.1)),
        "masked shapes": (lambda x: x.ndim == 2, optax.centralize()),
    }[name]
    masked = optax.masked(tx, functools.partial(jax.tree.map, chosen))
    with pytest.raises(zerojax.ZeroError, match=r"goes by sizes of leaves|depends on the leaf's shape"):
        on_shards(masked, zerojax.make_mesh(2, 4), leaves()[2:3], zerojax.ZeroConfig())


def of_items(params: Any) -> Any:
    return {name: "free" if name == "last" else "frozen" for name, _ in params.items()}


def of_paths(params: Any) -> Any:
    return traverse_util.path_aware_map(lambda path, _: "free" if path[0] == "last" else "frozen", params)


def of_flat(params: Any) -> Any:
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({p: "free" if p[0] == "last" else "frozen" for p in flat})


def test_labels_by_functions_that_walk_the_dict():
    """Moments are found, and spread like their parameters; others are not taken for them."""
    case = CASES["stack"]
    for labels in (of_items, of_paths, of_flat):
        tx = optax.multi_transform({"free": optax.adam(1e-2), "frozen": optax.sgd(0.1, momentum=0.9)}, labels)
        abstract = zerojax.TrainState.abstract(case.model, tx, case.loss, mesh=zerojax.make_mesh(2, 2))
        params = by_path(abstract.params)
        inner = abstract.opt_state.inner_states
        adam = by_path(inner["free"].inner_state[0].mu["last"])
        stack = by_path(inner["frozen"].inner_state[0].trace["stack"])
        assert len(adam) + len(stack) == len(params)
        for top, moments in (("last", adam), ("stack", stack)):
            for path, moment in moments.items():
                assert moment.sharding == params[top, *path].sharding
        assert inner["free"].inner_state[0].count.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: optax.chain(optax.adam(1e-2), contrib.reduce_on_plateau()), "'value'"),
        (lambda: optax.lookahead(optax.sgd(1e-2), 5, 0.5), "'fast'"),
        (lambda: optax.sm3(1e-2), "IndexError"),
    ],
)
def test_what_fails_without_shards_is_refused(make, why):
    """Most of them read more than gradients; SM3 fails on scalars."""
    with pytest.raises(zerojax.ZeroError, match=rf"fails on this model's parameters.*{why}.*Use another"):
        check_shardable(make(), leaves())


def test_a_state_that_an_update_changes_in_structure_is_refused():
    tx = optax.chain(optax.sgd(0.1), optax.monitor({"norm": optax.tree.norm}))
    with pytest.raises(zerojax.ZeroError, match=r"other arrays or shapes than its init"):
        check_shardable(tx, leaves()[:2])


def test_refused_before_anything_is_made():
    with pytest.raises(zerojax.ZeroError, match=r"'.*(kernel|scale|bias)' depends on the leaf's shape"):
        zerojax.TrainState.abstract(
            CASES["nnx"].model,
            contrib.muon(1e-2),
            CASES["nnx"].loss,
            mesh=zerojax.make_mesh(2, 2),
            zero=zerojax.ZeroConfig(units=CASES["nnx"].units),
        )


@pytest.mark.parametrize(
    "name",
    [
        "lamb",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("lion", "multi_transform", "multi steps", "injected")
        ),
    ],
)
def test_sharded_steps_equal_whole_ones(name):
    case, tx = CASES["nnx"], GOOD[name]()
    batches = case.batches(ROWS, 5)
    plain = plain_model("nnx")
    losses, wanted = plain_loop(plain, tx, batches)
    state = case.start(tx, plain.weights, nodes=3, local=2)
    found = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        found.append(float(metrics["loss"]))
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    assert distance(masters(state), wanted) < 1e-4


@pytest.mark.slow
def test_frozen_parameters_keep_their_bits_and_carry_no_moments():
    case = CASES["nnx"]
    state = case.create(GOOD["multi_transform"](), nodes=2, local=2)
    before = by_path(zerojax.gather_params(state))
    for batch in case.batches(ROWS, 2):
        state, _ = zerojax.train_step(state, batch)
    for path, after in by_path(zerojax.gather_params(state)).items():
        assert np.array_equal(after, before[path]) == ("kernel" in path), path
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    free = [path for path in before if "kernel" not in path]
    assert len(moments) == 2 * len(free)


def test_moments_live_where_their_parameters_live():
    state = CASES["nnx"].create(optax.adamw(1e-3), nodes=2, local=4)
    shards = {x.sharding for x in jax.tree.leaves(state.params) if x.ndim == 1}
    assert len(shards) == 1
    for x in jax.tree.leaves(state.opt_state):
        if x.ndim:
            assert x.addressable_shards[0].data.size * 8 == x.size
        else:
            assert x.sharding.is_fully_replicated


def test_what_was_checked_with_32_bits_is_checked_again_with_64():
    """An update that has no 64-bit form is the same operations after another trace."""
    given, seen = leaves(), []

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        seen.append(jax.config.jax_enable_x64)
        return jax.tree.map(lambda x: -0.1 * x, updates), state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    check_shardable(tx, given)
    with jax.enable_x64(True):
        check_shardable(tx, given)
    traced = len(seen)
    check_shardable(tx, given)
    assert set(seen) == {False, True}
    assert len(seen) == traced
