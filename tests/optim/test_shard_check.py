"""Optimizers that are right on shards give what they give on whole leaves; the others are refused."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from core_models import CASES
from flax import traverse_util
from optax import contrib
from plain_loop import by_path, distance, masters, plain_loop, plain_model

import zerojax
from zerojax.optim.shard_check import check_shardable
from zerojax.sharding.layout import ParamShape, make_layout
from zerojax.sharding.mesh import MeshShape

ROWS = 24


def leaves() -> tuple[Any, ...]:
    """A vector, a matrix, and a stacked matrix."""
    zero, world = zerojax.ZeroConfig(), MeshShape(2, 4)
    shapes = [(("norm", "scale"), (200,), ()), (("up", "kernel"), (200, 300), ())]
    shapes += [(("blocks", "kernel"), (200, 130), (3,)), (("gain",), (), ())]
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
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(0.1)),
    "centralized": lambda: optax.chain(optax.centralize(), optax.sgd(0.1)),
    "sm3": lambda: optax.sm3(1e-2),
}


@pytest.mark.parametrize("name", GOOD)
def test_what_works_leaf_by_leaf_is_taken(name):
    check_shardable(GOOD[name](), leaves())


@pytest.mark.parametrize("name", BAD)
def test_what_depends_on_a_leafs_shape_is_refused(name):
    with pytest.raises(
        zerojax.ZeroError, match=r"(depends on the leaf's shape|can't work on sharded leaves)"
    ) as e:
        check_shardable(BAD[name](), leaves()[:3])
    assert "Use a transform that works element by element" in str(e.value).replace("\n", " ")


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


def test_a_mask_by_ndim_of_a_stack_is_warned_of(recwarn):
    """A stacked norm has two dimensions: it would decay like a matrix."""
    by_ndim = optax.adamw(1e-2, mask=functools.partial(jax.tree.map, lambda x: x.ndim > 1))
    by_path = optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda label: label == "frozen", label(p)))
    zero, world = zerojax.ZeroConfig(), MeshShape(2, 4)
    norm = make_layout(
        ParamShape(("blocks", "scale"), (200,), "float32", (3,)), index=4, world=world, zero=zero
    )
    check_shardable(by_path, (*leaves(), norm))
    check_shardable(by_ndim, leaves()[:3])  # a stacked matrix is one in both
    assert not recwarn.list
    with pytest.warns(UserWarning, match="'blocks/scale' has 2,.*Choose leaves by their path"):
        check_shardable(by_ndim, (*leaves(), norm))


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
    ],
)
def test_what_reads_more_than_gradients_is_refused(make, why):
    with pytest.raises(zerojax.ZeroError, match=rf"from gradients, its state and parameters alone.*{why}"):
        check_shardable(make(), leaves()[:1])


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
    ["lamb", pytest.param("lion", marks=pytest.mark.slow), "multi_transform", "multi steps", "injected"],
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
