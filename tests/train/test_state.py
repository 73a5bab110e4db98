"""States side by side, moved between meshes, born sharded, and the state that is not parameters."""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import (
    CASES,
    WIDTH,
    Block,
    Case,
    Listed,
    Normed,
    NormedModel,
    Stacked,
    regression_batch,
    squared_error,
)
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec
from plain_loop import Plain, by_path, distance, masters, plain_loop, plain_model

import zerojax
from zerojax.train.initial import initializer
from zerojax.train.memory import device_bytes

ROWS = 24


def train(state: zerojax.TrainState, batches: list[Any]) -> tuple[zerojax.TrainState, list[float]]:
    losses = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_a_deep_copy_takes_the_same_steps():
    case = CASES["nnx"]
    batches = case.batches(ROWS, 2)
    state, _ = zerojax.train_step(case.begin(optax.sgd(0.1), nodes=2, local=2), batches[0])
    kept = copy.deepcopy(state)
    state, losses = train(state, batches)  # donates its own arrays, not those of the copy
    again, repeated = train(kept, batches)
    assert losses == repeated
    jax.tree.map(np.testing.assert_array_equal, state.params, again.params)


@pytest.mark.slow
def test_two_states_of_different_meshes_and_configs_take_turns():
    """Same classes, other everything: each goes the way it goes alone."""
    case, tx = CASES["nnx"], optax.sgd(0.02, momentum=0.9)
    batches = case.batches(ROWS, 3)
    wanted, _ = plain_loop(plain_model("nnx"), tx, batches)
    first = case.create(tx, nodes=2, local=4)
    second = case.create(tx, nodes=1, local=3, stage=1, units=())
    alone = case.create(tx, nodes=3, local=2, grads=("int8", "int4"), block_size=64)
    _, lossy = train(alone, batches)
    third = case.create(tx, nodes=3, local=2, grads=("int8", "int4"), block_size=64)
    found = []
    for batch in batches:
        first, one = zerojax.train_step(first, batch)
        third, three = zerojax.train_step(third, batch)
        second, two = zerojax.train_step(second, batch)
        found.append([float(m["loss"]) for m in (one, two, three)])
    one, two, three = zip(*found, strict=True)
    np.testing.assert_allclose(one, wanted, rtol=1e-6)
    np.testing.assert_allclose(two, wanted, rtol=1e-6)
    assert list(three) == lossy
    assert lossy != wanted


@pytest.mark.parametrize("name", ["nnx", pytest.param("linen-scan", marks=pytest.mark.slow)])
def test_trained_on_eight_evaluated_on_one(name):
    case, tx = CASES[name], optax.sgd(0.02, momentum=0.9)
    *batches, held_out = case.batches(ROWS, 3)
    eight, _ = train(case.begin(tx, nodes=2, local=4), batches)
    params = zerojax.gather_params(eight)
    one = zerojax.put_params(case.create(tx, nodes=1, local=1, seed=5, stage=0), params)
    wanted = zerojax.eval_step(eight, held_out)["loss"]
    np.testing.assert_allclose(zerojax.eval_step(one, held_out)["loss"], wanted, rtol=1e-6)
    np.testing.assert_allclose(
        case.loss(zerojax.gather_model(eight), held_out) if not case.linen else wanted, wanted, rtol=1e-6
    )
    for path, x in by_path(zerojax.gather_params(one)).items():
        np.testing.assert_array_equal(x, by_path(params)[path])


def test_a_gathered_linen_model_applies_as_the_module_does():
    case = CASES["linen"]
    state = case.begin(optax.sgd(0.1), nodes=2, local=2)
    batch = case.batches(ROWS, 1)[0]
    loss = squared_error(zerojax.gather_model(state), batch)
    np.testing.assert_allclose(loss, zerojax.eval_step(state, batch)["loss"], rtol=1e-6)


def test_a_gathered_model_has_the_users_own_classes():
    model = zerojax.gather_model(CASES["nnx"].begin(optax.sgd(0.1), nodes=2, local=2))
    assert type(model) is Listed
    assert {type(block) for block in model.blocks} == {Block}


@pytest.mark.parametrize("name", ["nnx", "stack", "gpt-tied"])
def test_a_seed_gives_the_weights_that_the_model_itself_has(name):
    case = CASES[name]
    model = zerojax.gather_model(case.create(optax.sgd(0.1), nodes=2, local=2, seed=3))
    wanted = case.model(nnx.Rngs(3))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7),
        nnx.to_pure_dict(nnx.state(model)),
        nnx.to_pure_dict(nnx.state(wanted)),
    )


def test_evaluation_changes_nothing_and_can_come_in_any_batch_size():
    case = CASES["nnx"]
    state = case.begin(optax.sgd(0.1), nodes=2, local=2, accumulate=2)
    before = [np.asarray(x) for x in jax.tree.leaves(state)]
    plain = plain_model("nnx")
    for rows in (4, 12):
        batch = case.batches(rows, 1)[0]
        np.testing.assert_allclose(
            zerojax.eval_step(state, batch)["loss"], plain.loss(plain.weights, batch), rtol=1e-6
        )
    for a, b in zip(before, jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stage", [1, 3])
def test_born_sharded(stage):
    """No device makes the whole model on the way: what init needs per device is far below it."""
    block = functools.partial(Block, width=128, hidden=512)
    state = zerojax.TrainState.abstract(
        functools.partial(Stacked, block=block, layers=8),
        optax.adamw(1e-3),
        squared_error,
        mesh=zerojax.make_mesh(2, 4),
        zero=zerojax.ZeroConfig(stage=stage),
    )
    model = sum(x.size * 4 for x in jax.tree.leaves(state.params))
    assert model > 4e6
    need = initializer(state.spec).lower(jax.ShapeDtypeStruct((), jnp.uint32)).compile().memory_analysis()
    # Masters and two moments, an eighth of each, and some padding.
    assert need.output_size_in_bytes < 1.1 * 3 * model / 8
    assert need.output_size_in_bytes + need.temp_size_in_bytes < model


class LinenNormed(linen.Module):
    train: bool = True

    @linen.compact
    def __call__(self, x):
        return x + linen.BatchNorm(use_running_average=False, momentum=0.8)(linen.Dense(WIDTH)(x))


@pytest.mark.parametrize("stacked", [False, True])
def test_batch_statistics_are_means_over_devices_and_micro_batches_follow_each_other(stacked):
    model = functools.partial(NormedModel, stacked=stacked)
    case = Case(model, squared_error, (Normed,), regression_batch)
    state = case.create(optax.sgd(0.0), nodes=2, local=2, accumulate=2)
    batch = case.batches(16, 1)[0]
    state, _ = zerojax.train_step(state, batch)
    each = []
    for device in range(4):
        own = model(nnx.Rngs(0))
        for micro in range(2):
            own(batch["x"][device * 4 + micro * 2 :][:2])
        each.append(nnx.to_pure_dict(nnx.state(own, nnx.BatchStat)))
    wanted = by_path(jax.tree.map(lambda *x: np.mean(x, 0), *each))
    found = {tuple(name.split("/")): x for name, x in state.model_state.items()}
    assert found.keys() == wanted.keys()
    for path, x in wanted.items():
        np.testing.assert_allclose(found[path], x, rtol=1e-5, atol=1e-6)
        assert np.abs(x - (path[-1] == "var")).max() > 1e-3, "statistics have moved"
    # Evaluation uses them, as the gathered model does.
    np.testing.assert_allclose(
        zerojax.eval_step(state, batch)["loss"], squared_error(zerojax.gather_model(state), batch), rtol=1e-5
    )


def test_linen_batch_statistics():
    case = Case(LinenNormed(), squared_error, (linen.Dense,), regression_batch, linen=True)
    state = case.create(optax.sgd(0.1), nodes=1, local=2)
    batch = case.batches(8, 1)[0]
    params = zerojax.gather_params(state)
    state, _ = zerojax.train_step(state, batch)
    hidden = batch["x"] @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    means = [0.2 * half.mean(0) for half in (hidden[:4], hidden[4:])]
    np.testing.assert_allclose(
        state.model_state["batch_stats/BatchNorm_0/mean"], np.mean(means, 0), rtol=1e-5
    )


class Dropping(nnx.Module):
    """One weight of 0.5 times a mask: the loss is what the mask keeps."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.full((1, 1), 0.5))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.broadcast_to(x * self.w[...], (len(x), 64)))


class DroppingModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.block = Dropping(rngs=rngs)

    def __call__(self, x):
        return self.block(x)


class LinenDropping(linen.Module):
    @linen.compact
    def __call__(self, x):
        w = self.param("w", lambda _: jnp.full((1, 1), 0.5))
        return linen.Dropout(0.5, deterministic=False)(jnp.broadcast_to(x * w, (len(x), 64)))


class Plainly(nnx.Module):
    """The same without a dropout of its own: the loss function drops."""

    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.full((1, 1), 0.5))

    def __call__(self, x):
        return jnp.broadcast_to(x * self.w[...], (len(x), 64))


def dropped_by_loss(model: Any, batch: Any, rngs: nnx.Rngs) -> jax.Array:
    out = model(batch["x"])
    return jnp.mean(jnp.where(jax.random.bernoulli(rngs.dropout(), 0.5, out.shape), out * 2, 0))


def ones(rng: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    del rng
    return {"x": np.ones((rows, 1), np.float32)}


def mean_out(model: Any, batch: Any) -> jax.Array:
    return jnp.mean(model(batch["x"]))


DROPPING = {
    "nnx": Case(DroppingModel, mean_out, (Dropping,), ones),
    "linen": Case(LinenDropping(), mean_out, (LinenDropping,), ones, linen=True),
    "loss": Case(Plainly, dropped_by_loss, (Plainly,), ones),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_reproducible_fresh_and_the_same_both_ways(name):
    case = DROPPING[name]
    batches = case.batches(8, 5)

    def kept(seed: int) -> list[int]:
        """How many of 8 x 64 elements each step kept; checks the gradient on the way."""
        state = case.create(optax.sgd(0.0), nodes=2, local=4, seed=seed, weights="fp32")
        counts = []
        for batch in batches:
            state, metrics = zerojax.train_step(state, batch)
            # d loss / d w = loss / w, if the backward pass drops what the forward pass dropped.
            np.testing.assert_allclose(metrics["grad_norm"], 2 * metrics["loss"], rtol=1e-5)
            counts.append(float(metrics["loss"]) * 8 * 64)
        return [round(count) for count in counts]

    first = kept(1)
    assert first == kept(1)
    assert first != kept(2)
    assert len(set(first)) > 1, "every step has masks of its own"
    assert all(150 < count < 360 for count in first)
    assert any(count % 8 for count in first), "every device has a mask of its own"


def test_nnx_evaluation_drops_nothing():
    case = DROPPING["nnx"]
    state = case.create(optax.sgd(0.0), nodes=2, local=2)
    np.testing.assert_allclose(zerojax.eval_step(state, case.batches(8, 1)[0])["loss"], 0.5, rtol=1e-6)


class Shared(nnx.Module):
    """A unit that uses a layer which it does not own alone."""

    def __init__(self, shared: nnx.Linear, *, rngs: nnx.Rngs):
        self.own = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.shared = shared

    def __call__(self, x):
        return x + jnp.tanh(self.shared(self.own(x)))


class Tied(nnx.Module):
    """A layer shared by two units, and perhaps by the model itself."""

    def __init__(self, rngs: nnx.Rngs, outside: bool):
        shared = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Shared(shared, rngs=rngs) for _ in range(2)])
        if outside:
            self.outer = shared
        self.last = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(self.outer(x) if hasattr(self, "outer") else x)


@pytest.mark.parametrize("outside", [False, True])
def test_tied_parameters_count_once_and_collect_all_their_gradients(outside):
    case = Case(functools.partial(Tied, outside=outside), squared_error, (Shared,), regression_batch)
    tx, batches = optax.sgd(0.02, momentum=0.9), case.batches(ROWS, 4)
    plain = Plain(case)
    wanted_losses, wanted = plain_loop(plain, tx, batches)
    state = case.start(tx, plain.weights, nodes=3, local=2)
    assert len(state.spec.leaves) == 2 * 2 + 2 + 2
    state, losses = train(state, batches)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
    assert distance(zerojax.gather_params(state), wanted) < 1e-5


@pytest.mark.parametrize(
    ("layers", "hpz"),
    [
        (1, False),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, False, marks=pytest.mark.slow),
        (2, True),
        pytest.param(4, True, marks=pytest.mark.slow),
    ],
)
def test_stacks_of_few_layers(layers, hpz):
    """The pipeline's first and last layers are special; here there is nothing, or little, between."""
    case = Case(functools.partial(Stacked, layers=layers), squared_error, (), regression_batch)
    tx, batches = optax.sgd(0.02, momentum=0.9), case.batches(ROWS, 4)
    plain = Plain(case)
    wanted_losses, wanted = plain_loop(plain, tx, batches)
    state, losses = train(case.start(tx, plain.weights, nodes=3, local=2, hpz=hpz), batches)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
    assert distance(masters(state), wanted) < 1e-5


def test_the_bytes_of_a_device_are_those_of_its_part_random_keys_included():
    sharding = NamedSharding(zerojax.make_mesh(2, 2), PartitionSpec("node", "local"))
    part = jax.ShapeDtypeStruct((4, 6), jnp.bfloat16, sharding=sharding)
    assert device_bytes({"part": part, "whole": np.zeros(3, np.float32)}) == 2 * 3 * 2 + 3 * 4
    key = jax.random.key(0)  # as the state of dropout has; its dtype is none of numpy's
    assert device_bytes(key) == jax.random.key_data(key).nbytes


def test_a_state_is_described_in_a_few_lines():
    case = CASES["stack"]
    state = case.create(optax.adam(0.1), nodes=2, local=2, hpz=True)
    lines = repr(state).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 200
    trained = sum(x.size for x in jax.tree.leaves(zerojax.gather_params(state)))
    for part in ("step 0, seed 0", f"trained: {trained:,}", "mesh: 2 x 2", "hpz=True", "opt_state"):
        assert part in repr(state)
    after, _ = zerojax.train_step(state, case.batches(ROWS, 1)[0])
    assert "step 1" in repr(after)
    assert "donated" in repr(state)
    for name in ("params", "opt_state"):
        with pytest.raises(zerojax.ZeroError, match=r"passed to train_step before.*use the state that"):
            getattr(state, name)
        assert getattr(after, name)
    assert "abstract" in repr(jax.eval_shape(lambda: after))
