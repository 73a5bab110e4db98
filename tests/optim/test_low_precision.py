"""Moments in bfloat16 and in 8 bits: unbiased, and read from checkpoints of any dtype."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.optim import low_precision
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.zero_config.options import Moments


class Model(nnx.Module):
    """Two layers, of sizes that divide nothing."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(7, 13, rngs=rngs), nnx.Linear(13, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    sizes = {"x": 7, "y": 3}
    return {name: rng.standard_normal((24, size)).astype(np.float32) for name, size in sizes.items()}


as_moment = jax.jit(low_precision.as_moment, static_argnums=1)
to_codes = jax.jit(low_precision.to_codes, static_argnums=1)
round_to_bfloat16 = jax.jit(low_precision.round_to_bfloat16)
ADAMW = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.999))


def created(
    moments: Moments, mesh: tuple[int, int] = (2, 2), tx: Any = ADAMW, *, abstract: bool = False
) -> zerojax.TrainState:
    make = zerojax.TrainState.abstract if abstract else zerojax.TrainState.create
    zero = zerojax.ZeroConfig(compute_dtype="float32", units=(nnx.Linear,), moments=moments)
    return make(Model, tx, loss, mesh=zerojax.make_mesh(*mesh), zero=zero)


def trained(state: zerojax.TrainState, steps: range) -> zerojax.TrainState:
    for step in steps:
        state, _ = zerojax.train_step(state, batch_of(step))
    return state


def moments_of(state: zerojax.TrainState) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(state.opt_state) if x.ndim]


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_rounds_to_either_neighbour_and_keeps_the_mean() -> None:
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(100_000) * 10.0 ** rng.integers(-30, 30, 100_000)).astype(np.float32)
    noise = rng.integers(0, 2**32, x.size, dtype=np.uint32)
    found = np.asarray(round_to_bfloat16(jnp.asarray(x), jnp.asarray(noise)), np.float32)
    toward_zero = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    away = ((x.view(np.uint32) & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view(np.float32)
    assert np.all((found == toward_zero) | (found == away))
    error = (found - x) / np.abs(x)
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(x.size)


@pytest.mark.parametrize(
    "x", [0.0, -0.0, np.inf, -np.inf, np.nan, np.uint32(0x7FFFFFFF).view(np.float32), 1.5, -(2.0**-120)]
)
def test_keeps_what_bfloat16_has(x: float) -> None:
    for noise in (0, 0xFFFF, 0xFFFFFFFF):
        found = round_to_bfloat16(jnp.float32(x), jnp.uint32(noise))
        assert np.array_equal(np.float32(found), jnp.bfloat16(x).astype(np.float32), equal_nan=True)


def numbers(dtype: Any) -> np.ndarray:
    """What positive codes stand for."""
    lowest, count = (-28, 127) if dtype == jnp.int8 else (-56, 254)
    return np.array([2.0 ** (lowest + n // 4) * (1 + n % 4 / 4) for n in range(count)])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_codes(dtype: Any) -> None:
    """Each has its number, which bfloat16 has, too, and becomes itself again whatever the noise."""
    exact = numbers(dtype)
    codes = np.arange(1, 1 + exact.size).astype(dtype)
    signed = [(codes, exact), (np.zeros(1, dtype), np.zeros(1))]
    if dtype == jnp.int8:
        signed += [(-codes, -exact)]
    for code, number in signed:
        for kept in (jnp.float32, jnp.bfloat16):
            found = as_moment(jnp.asarray(code), kept)
            assert found.dtype == kept
            np.testing.assert_array_equal(np.asarray(found, np.float64), number)
            np.testing.assert_array_equal(as_moment(found, dtype), code)
        for noise in (0, 0x001FFFFF, 0xFFFFFFFF):
            np.testing.assert_array_equal(
                to_codes(jnp.asarray(number, jnp.float32), dtype, jnp.uint32(noise)), code
            )


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_codes_are_those_of_either_neighbour_and_keep_the_mean(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    exact = np.concatenate([[0.0], numbers(dtype)])
    lowest = np.log10(exact[1]) - (2 if dtype == jnp.int8 else 0)
    x = (10.0 ** rng.uniform(lowest, np.log10(exact[-1]), 200_000)).astype(np.float32)
    x *= rng.choice([-1, 1], x.size) if dtype == jnp.int8 else 1
    noise = rng.integers(0, 2**32, x.size, dtype=np.uint32)
    found = np.asarray(as_moment(to_codes(jnp.asarray(x), dtype, jnp.asarray(noise)), jnp.float32))
    above = np.searchsorted(exact, np.abs(x))
    under, over = exact[above - 1], exact[above]
    assert np.all((np.abs(found) == under) | (np.abs(found) == over))
    assert np.all(found * x >= 0)
    error = (found - x) / np.maximum(np.abs(x), exact[1])
    assert abs(error.mean()) < 4 * error.std() / np.sqrt(x.size)
    up = (np.abs(found) == over).mean()
    assert up == pytest.approx(((np.abs(x) - under) / (over - under)).mean(), abs=0.005)


def test_what_codes_do_not_have() -> None:
    x = jnp.asarray([20.0, -1e30, jnp.nan, jnp.inf, -jnp.inf, 1e-12], jnp.float32)
    for noise, last in ((0xFF << 20, 0.0), (1 << 20, 2.0**-28)):  # which comes with a chance of 0.0003
        found = as_moment(to_codes(x, jnp.int8, jnp.uint32(noise)), jnp.float32)
        np.testing.assert_array_equal(found, [12.0, -12.0, np.nan, np.nan, np.nan, last])
    squares = jnp.asarray([400.0, jnp.nan, jnp.inf, 1e-30, -1e-30], jnp.float32)
    found = as_moment(to_codes(squares, jnp.uint8, jnp.uint32(0xFFFFFFFF)), jnp.float32)
    np.testing.assert_array_equal(found, [160.0, np.nan, np.nan, 2.0**-56, 0.0])
    np.testing.assert_array_equal(
        as_moment(jnp.asarray([1.1, 1.15, 2.0**-29.5], jnp.float32), jnp.int8), [113, 114, 0]
    )


@pytest.mark.parametrize(("moments", "spread"), [("bfloat16", 0.2), ("float8", 2.0)])
def test_a_slow_average_moves(moments: Moments, spread: float) -> None:
    """Rounded to nearest, an average of constant squares never gets beyond half a percent of a step."""
    state = created(moments, (1, 1), optax.scale_by_adam(b2=0.999))
    tx, params = state.spec.tx, state.params
    assert tx is not None
    gradient = jax.tree.map(lambda x: jnp.linspace(0.5, 2.0, x.size).reshape(x.shape), params)
    update = jax.jit(tx.update)
    opt_state = state.opt_state
    for _ in range(1500):
        _, opt_state = update(gradient, opt_state, params)
    found = np.concatenate([as_moment(x, jnp.float32).ravel() for x in jax.tree.leaves(opt_state.rounded.nu)])
    exact = np.concatenate([x.ravel() for x in leaves(gradient)]) ** 2 * (1 - 0.999**1500)
    assert found.mean() == pytest.approx(exact.mean(), rel=spread / 20)
    np.testing.assert_allclose(found, exact, rtol=spread)


@pytest.mark.parametrize(
    ("mesh", "moments", "kinds", "share"),
    [
        pytest.param((1, 1), "bfloat16", {"bfloat16"}, 1e-4, marks=pytest.mark.slow),
        ((3, 2), "bfloat16", {"bfloat16"}, 1e-4),
        ((3, 2), "float8", {"int8", "uint8"}, 0.1),
    ],
)
def test_trains_nearly_as_in_fp32(
    mesh: tuple[int, int], moments: Moments, kinds: set[str], share: float
) -> None:
    exact, rounded = trained(created("float32", mesh), range(6)), trained(created(moments, mesh), range(6))
    assert {x.dtype.name for x in moments_of(rounded)} == kinds
    assert {x.dtype for x in jax.tree.leaves(rounded.params)} == {jnp.dtype(jnp.float32)}
    before = zerojax.gather_params(created("float32", mesh))
    moved, off = 0.0, 0.0
    for start, x, y in zip(
        *map(leaves, (before, *map(zerojax.gather_params, (exact, rounded)))), strict=True
    ):
        moved += float(np.sum((x - start) ** 2))
        off += float(np.sum((y - x) ** 2))
    assert 0 < off < share * moved


def values(moments: list[jax.Array]) -> list[np.ndarray]:
    on_device = (jnp.asarray(np.asarray(x)) for x in moments)  # from host memory, too
    return [np.asarray(as_moment(x, jnp.float32)) for x in on_device]


@pytest.mark.parametrize(
    ("saved", "now", "precision"),
    [
        ("float32", "bfloat16", 2.0**-8),
        pytest.param("bfloat16", "float32", 2.0**-8, marks=pytest.mark.slow),
        ("float8", "float32", 0),
        pytest.param("float32", "float8", 0.125, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_has_moments_of_any_dtype(
    saved: Moments, now: Moments, precision: float, tmp_path: Path
) -> None:
    before = trained(created(saved), range(2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, before, Record())
    same = trained(restore(tmp_path / "2", created(saved, abstract=True)), range(2, 4))
    other = restore(tmp_path / "2", created(now, (1, 2), abstract=True))
    for x, y in zip(values(moments_of(before)), values(moments_of(other)), strict=True):
        np.testing.assert_allclose(np.sort(x.ravel())[-9:], np.sort(y.ravel())[-9:], rtol=precision)
    assert {str(x.dtype) for x in moments_of(other)} == ({"int8", "uint8"} if now == "float8" else {now})
    after = trained(before, range(2, 4))
    for x, y in zip(leaves(after.opt_state), leaves(same.opt_state), strict=True):
        assert np.array_equal(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("host", [(), ("optimizer",)], ids=["device", "host"])
def test_nodes_have_moments_in_8_bits_of_their_own(host: tuple[str, ...], tmp_path: Path) -> None:
    """They come back bit for bit, and other nodes begin with their mean."""

    def made(mesh: tuple[int, int], moments: Moments, *, abstract: bool = True) -> zerojax.TrainState:
        make = zerojax.TrainState.abstract if abstract else zerojax.TrainState.create
        zero = zerojax.ZeroConfig.preset(
            "local", every=4, compute_dtype="float32", units=(nnx.Linear,), moments=moments, host=host
        )
        return make(Model, ADAMW, loss, mesh=zerojax.make_mesh(*mesh), zero=zero)

    state = trained(made((2, 2), "float8", abstract=False), range(2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, Record())
    again = restore(tmp_path / "2", made((2, 2), "float8"))
    for x, y in zip(leaves(again.opt_state), leaves(state.opt_state), strict=True):
        assert x.dtype == y.dtype
        assert np.array_equal(x, y)
    others = (restore(tmp_path / "2", made((3, 2), moments)) for moments in ("float8", "float32"))
    coarse, exact = (values([x for x in moments_of(other) if x.ndim > 1]) for other in others)  # not counts
    for x, y in zip(coarse, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=0.125, atol=2.0**-29)
    for x, y in zip(leaves(trained(again, range(2, 3))), leaves(trained(state, range(2, 3))), strict=True):
        assert np.array_equal(x, y)


def test_muons_momentum() -> None:
    tx = zerojax.chain(zerojax.scale_by_muon(), optax.scale(-1e-2))
    state = trained(created("bfloat16", tx=tx), range(2))
    assert {x.dtype for x in moments_of(state)} == {jnp.dtype(jnp.bfloat16)}


def test_an_average_of_weights_stays_in_fp32() -> None:
    state = created("bfloat16", tx=optax.chain(ADAMW, zerojax.average_weights(0.9)))
    kinds = {str(x.dtype) for x in moments_of(state)}
    assert kinds == {"bfloat16", "float32"}
    assert {str(x.dtype) for x in jax.tree.leaves(zerojax.averaged(trained(state, range(1))).params)} == {
        "float32"
    }


def test_a_number_of_a_whole_weight_stays_in_fp32() -> None:
    state = created("bfloat16", tx=optax.novograd(1e-2), abstract=True)
    second = jax.tree.leaves(optax.tree.get(state.opt_state, "nu"))
    assert {(x.shape, str(x.dtype)) for x in second} == {((), "float32")}


def test_refuses_an_optimizer_without_moments() -> None:
    with pytest.raises(ConfigurationError, match="has no fp32 moments"):
        created("bfloat16", tx=optax.sgd(1e-2))
    with pytest.raises(ConfigurationError, match="centered=True"):
        created("bfloat16", tx=optax.rmsprop(1e-2, centered=True))
    with pytest.raises(ConfigurationError, match=r"ZeroConfig\.moments='int8'"):
        zerojax.ZeroConfig(moments="int8")  # pyrefly: ignore[bad-argument-type]
