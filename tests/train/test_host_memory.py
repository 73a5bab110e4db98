"""Master weights and moments in host memory: the same steps, checkpoints and refusals as on the device."""

import dataclasses
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA
from zerojax.sharding.layout import OWNED, ParamLayout
from zerojax.sharding.memory import HOST
from zerojax.sharding.param_tree import from_tree
from zerojax.train import initial, step
from zerojax.train.frozen import load_frozen
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState
from zerojax.train.step import train_step
from zerojax.zero_config.config import Preset, ZeroConfig
from zerojax.zero_config.options import HostStore

WIDTH = 24
# Powers of two: products with them are exact, so it does not matter which of them the compiler fuses with a
# sum, and both programs have the same bits.
EXACT = optax.adamw(2.0**-7, b1=0.5, b2=0.5, weight_decay=2.0**-5)
PLAIN = {"rotation": 0, "rounding": "nearest", "grads": ("fp32", "fp32")}
"""How gradients are encoded does not depend on where masters are, and is half of a compile."""
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 4)))


class Block(nnx.Module):
    """A residual MLP: matrices and a vector, each with kernels of its own to compile."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(3 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(self.norm(x))))


class Model(nnx.Module):
    """A stack of several layers, a unit by itself, and weights outside of units."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = zerojax.Stack(Block, 4, rngs=rngs)
        self.last = Block(rngs=rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.last(self.blocks(x)))


def loss(model: Model, batch: dict[str, jax.Array]) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def batch_of(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    x, y = rng.standard_normal((48, WIDTH)), rng.standard_normal((48, 3))
    if number == 1:
        y[0] = np.nan  # a step that is skipped
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def created(mesh: tuple[int, int], tx: Any, preset: Preset = "zero3", **options: Any) -> TrainState:
    zero = ZeroConfig.preset(preset, units=(Block,), **options)
    return TrainState.create(Model, tx, loss, mesh=zerojax.make_mesh(*mesh), zero=zero, seed=1)


def trained(state: TrainState, steps: range = range(3)) -> tuple[TrainState, list[list[float]]]:
    told = []
    for number in steps:
        state, metrics = train_step(state, batch_of(number))
        told.append([float(metrics[name]) for name in ("loss", "grad_norm", "skipped")])
    return state, told


def same_weights(one: TrainState, other: TrainState) -> bool:
    pairs = zip(*(jax.tree.leaves(zerojax.gather_params(state)) for state in (one, other)), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize(
    ("mesh", "preset", "host", "options"),
    [
        ((2, 2), "delta", ("optimizer", "weights"), PLAIN),
        pytest.param((2, 2), "delta", ("optimizer", "weights"), {}, marks=pytest.mark.slow),
        pytest.param((2, 4), "delta", ("optimizer",), {}, marks=pytest.mark.slow),
        pytest.param((1, 1), "zero3", ("optimizer", "weights"), {}, marks=pytest.mark.slow),
        pytest.param((3, 2), "zero++", ("optimizer", "weights"), {}, marks=pytest.mark.slow),
        pytest.param((3, 2), "zero3", ("optimizer",), {"stage": 1}, marks=pytest.mark.slow),
        pytest.param((2, 4), "zero3", ("optimizer",), {"stage": 2}, marks=pytest.mark.slow),
        pytest.param(
            (2, 2),
            "delta",
            ("optimizer", "weights"),
            {"accumulate": 2, "accumulate_order": "breadth"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_have_the_bits_of_those_on_the_device(
    mesh: tuple[int, int], preset: Preset, host: tuple[str, ...], options: dict[str, Any]
) -> None:
    state, told = trained(created(mesh, EXACT, preset, **options))
    other, also = trained(created(mesh, EXACT, preset, host=host, **options))
    assert np.array_equal(told, also, equal_nan=True)
    assert [skipped for *_, skipped in told] == [0, 1, 0]
    assert same_weights(state, other)
    if "weights" in host:
        assert {w.values.sharding.memory_kind for w in other.encoded.values()} == {HOST}
    assert int(zerojax.eval_step(other, batch_of(0))["loss"] == zerojax.eval_step(state, batch_of(0))["loss"])


LOCAL: dict[str, Any] = {"every": 4, "block_size": 64, "outer_momentum": 0.5, "outer_learning_rate": 0.5}
EXACTLY: dict[str, Any] = {"weights": None, "grads": (None, None), "rotation": 0, "error_feedback": False}
MOMENTUM = optax.sgd(2.0**-6, momentum=0.5)


@pytest.mark.parametrize(
    ("mesh", "tx", "host", "options"),
    [
        pytest.param(
            (2, 2),
            MOMENTUM,
            ("optimizer", "weights"),
            EXACTLY | {"error_feedback": True},  # of bf16
            marks=pytest.mark.slow,
        ),
        *(
            pytest.param(mesh, tx, host, {"outer_delay": delay, **formats}, marks=pytest.mark.slow)
            for mesh, tx, host, delay, formats in [
                ((2, 1), MOMENTUM, ("optimizer",), 0, {}),
                ((2, 1), EXACT, ("optimizer", "weights"), 1, EXACTLY),
                ((2, 4), MOMENTUM, ("optimizer", "weights"), 0, EXACTLY),
                ((2, 4), MOMENTUM, ("optimizer",), 1, {"error_feedback": False}),
                ((2, 4), EXACT, ("optimizer",), 2, {}),
                ((3, 2), EXACT, ("optimizer", "weights"), 0, {}),
                ((3, 2), MOMENTUM, ("optimizer",), 2, EXACTLY),
                ((3, 2), MOMENTUM, ("optimizer",), 3, {"stage": 1, "accumulate": 2}),
                ((1, 2), MOMENTUM, ("optimizer", "weights", "activations"), 2, {"error_feedback": False}),
            ]
        ),
    ],
)
def test_local_updates_have_the_bits_of_those_on_the_device(
    mesh: tuple[int, int],
    tx: Any,
    host: tuple[str, ...],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tx is EXACT:
        # It makes one division of Adam's two in one of the programs, which rounds once instead of twice.
        monkeypatch.setattr(step, "_compiler_options", lambda _: {"xla_disable_hlo_passes": "algsimp"})
    state, told = trained(created(mesh, tx, "local", **LOCAL | options), range(7))
    other, also = trained(created(mesh, tx, "local", host=host, **LOCAL | options), range(7))
    assert np.array_equal(told, also, equal_nan=True)
    assert sum(skipped for *_, skipped in told) == 1
    for name in ("params", "opt_state", "residual", "local"):
        jax.tree.map(np.testing.assert_array_equal, getattr(other, name), getattr(state, name))
    assert state.local is not None
    assert other.local is not None
    own = from_tree(other.local.weights)
    for path, weight in other.encoded.items():
        assert np.array_equal(own[path].reshape(weight.values.shape).astype(jnp.bfloat16), weight.values)
    held = (other.params, other.residual, other.local.weights, other.local.known, other.local.momentum)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(held)} == {HOST}
    assert float(zerojax.eval_step(other, batch_of(0))["loss"]) == float(
        zerojax.eval_step(state, batch_of(0))["loss"]
    )


@pytest.mark.parametrize(
    "moments", ["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "float8"))]
)
def test_a_norm_is_that_of_the_whole_tree(moments: str) -> None:
    """And masters and moments are in host memory, and other weights are encoded again."""
    state, told = trained(created((2, 2), CLIPPED, moments=moments))
    other, also = trained(created((2, 2), CLIPPED, moments=moments, host=("optimizer",)))
    np.testing.assert_allclose(told, also, rtol=1e-6)
    one, two = (zerojax.gather_params(x) for x in (state, other))
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-7), one, two)
    held = (other.params, [x for x in jax.tree.leaves(other.opt_state) if x.ndim])
    assert {x.sharding.memory_kind for x in jax.tree.leaves(held)} == {HOST}
    assert {x.sharding.memory_kind for x in jax.tree.leaves(other.encoded)} == {"device"}
    halved = jax.tree.map(lambda x: x / 2, two)
    wanted, found = (zerojax.eval_step(zerojax.put_params(x, halved), batch_of(0)) for x in (state, other))
    assert float(found["loss"]) == float(wanted["loss"])


def test_a_state_larger_than_the_device_is_made_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two arrays at most, with the same values."""
    at_once = created((1, 2), EXACT, host=("optimizer",))
    monkeypatch.setattr(
        initial, "_AT_ONCE", 4 * 4 * 3 * WIDTH**2
    )  # a stacked kernel, of which a device has half
    in_portions = created((1, 2), EXACT, host=("optimizer",))
    fields = ((x.params, x.opt_state, x.model_state, x.encoded) for x in (at_once, in_portions))
    jax.tree.map(np.testing.assert_array_equal, *fields)
    assert {x.sharding.memory_kind for x in jax.tree.leaves(in_portions.params)} == {HOST}


@pytest.mark.slow
@pytest.mark.parametrize("spread", ["node", "world"])
def test_muon_updates_layers_by_themselves(spread: str) -> None:
    tx = zerojax.chain(optax.clip_by_global_norm(0.1), zerojax.scale_by_muon(), optax.scale(-1e-3))
    state, told = trained(created((2, 2), tx, matrix_spread=spread), range(1))
    other, also = trained(created((2, 2), tx, matrix_spread=spread, host=("optimizer",)), range(1))
    # After one step: where singular values are small, Newton-Schulz magnifies how their sums were rounded.
    one, two = (jax.tree.leaves(zerojax.gather_params(x)) for x in (state, other))
    for x, y in zip(one, two, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6)
    _, later = trained(state, range(1, 3))
    _, also_later = trained(other, range(1, 3))
    np.testing.assert_allclose(told + later, also + also_later, rtol=1e-6)


@pytest.mark.parametrize(
    ("mesh", "preset", "host", "options"),
    [
        pytest.param((1, 2), "zero3", ("weights",), {"frozen_weights": "nf4"}, marks=pytest.mark.slow),
        pytest.param(
            (2, 2),
            "zero3",
            ("weights",),
            {"frozen_spread": "world", "frozen_weights": "nf4"},
            marks=pytest.mark.slow,
        ),
        pytest.param((1, 1), "zero3", ("optimizer", "weights"), {}, marks=pytest.mark.slow),
        pytest.param((2, 4), "zero++", ("weights",), {}, marks=pytest.mark.slow),
    ],
)
def test_frozen_weights_are_read_from_host_memory(
    mesh: tuple[int, int], preset: Preset, host: tuple[HostStore, ...], options: dict[str, Any]
) -> None:
    """Beside adapters; created, and loaded layer by layer."""

    def adapted(host: tuple[HostStore, ...]) -> TrainState:
        zero = ZeroConfig.preset(preset, units=(Block,), frozen=("*/kernel",), host=host, **options)
        mesh_of = zerojax.make_mesh(*mesh)
        return TrainState.create(Model, EXACT, loss, mesh=mesh_of, zero=zero, seed=1, lora=LoRA(rank=4))

    def read(spec: TrainSpec, leaf: ParamLayout, layer: int | None) -> jax.Array:
        one = dataclasses.replace(leaf, stack=() if layer is None else (1,))
        values = np.random.default_rng([leaf.index, layer or 0]).standard_normal(one.stored_shape, np.float32)
        return jax.device_put(values, spec.sharding(one.spec(OWNED)))

    plain, held = adapted(()), adapted(host)
    assert {w.sharding.memory_kind for w in jax.tree.leaves(held.frozen)} == {HOST}
    loaded, there = (load_frozen(x.spec, partial(read, x.spec)) for x in (plain, held))
    assert {w.sharding.memory_kind for w in jax.tree.leaves(there["frozen"])} == {HOST}
    jax.tree.map(np.testing.assert_array_equal, there, loaded)
    plain, told = trained(plain, range(2))
    held, also = trained(held, range(2))
    assert np.array_equal(told, also, equal_nan=True)
    assert same_weights(plain, held)


def test_refuses_weights_of_which_none_is_frozen_alone() -> None:
    with pytest.raises(ConfigurationError, match='without "optimizer", and no weight is frozen'):
        created((1, 1), EXACT, host=("weights",))


@pytest.mark.slow
def test_an_update_in_a_branch() -> None:
    tx = optax.MultiSteps(EXACT, 2).gradient_transformation()
    state, _ = trained(created((1, 1), tx))
    other, _ = trained(created((1, 1), tx, host=("optimizer",)))
    one, two = (jax.tree.leaves(zerojax.gather_params(x)) for x in (state, other))
    for x, y in zip(one, two, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-7)


def test_refuses_a_state_of_all_weights_together() -> None:
    with pytest.raises(ConfigurationError, match=r"optax\.flatten"):
        created((1, 2), optax.flatten(optax.adam(1e-3)), host=("optimizer",))


def test_refuses_norms_of_weights() -> None:
    with pytest.raises(ConfigurationError, match="norms of weights or moments"):
        created((1, 1), optax.lamb(1e-3), host=("optimizer",))
    with pytest.raises(ConfigurationError, match="accumulate="):
        created((1, 1), optax.MultiSteps(CLIPPED, 2), host=("optimizer",))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": ("disk",)}, "'disk'"),
        ({"host": ("optimizer",), "stage": 0}, "stage=0"),
        ({"host": ("optimizer",), "every": 4, "matmul_dtype": "fp8"}, 'one fragment .* matmul_dtype="fp8"'),
        ({"host": ("optimizer",), "every": 4, "local_weights": "int8"}, "one fragment .*'int8'"),
        ({"host": ("optimizer",), "every": 4, "update_in_backward": True}, "no local updates"),
    ],
)
def test_refuses_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ZeroConfig(**options)
