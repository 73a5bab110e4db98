"""Weights of experts spread over a node's devices, against a plain optax loop and other ways of sharding.

The layer is written out here, without ``zerojax.Experts``: every device sees its node's tokens and computes
what its own experts add, each expert for all tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import started
from flax import nnx
from jax import lax
from plain_loop import distance

import zerojax
from zerojax.adapters.roles import ExpertParam
from zerojax.errors import ZeroError
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.sharding.mesh import LOCAL
from zerojax.sharding.param_tree import from_tree
from zerojax.zero_config.config import Preset

EXPERTS, WIDTH, HIDDEN, ROWS, LAYERS = 24, 5, 3, 120, 3


@jax.custom_vjp
def everywhere(x: jax.Array) -> jax.Array:
    """The tokens of all of a node's devices; their gradients come home summed."""
    return lax.all_gather(x, LOCAL, tiled=True)


everywhere.defvjp(lambda x: (everywhere(x), None), lambda _, g: (lax.psum_scatter(g, LOCAL, tiled=True),))


@jax.custom_vjp
def home(x: jax.Array) -> jax.Array:
    """The sum of what all devices add to this device's tokens."""
    return lax.psum_scatter(x, LOCAL, tiled=True)


home.defvjp(lambda x: (home(x), None), lambda _, g: (lax.all_gather(g, LOCAL, tiled=True),))


class Mixture(nnx.Module):
    """A softmax mixture of all experts, of which each device may hold a part."""

    def __init__(self, *, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.5)
        self.router = nnx.Param(normal(rngs.params(), (WIDTH, EXPERTS)))
        self.up = ExpertParam(normal(rngs.params(), (EXPERTS, WIDTH, HIDDEN)))
        self.down = ExpertParam(normal(rngs.params(), (EXPERTS, HIDDEN, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        up, down = self.up[...], self.down[...]
        weights = jax.nn.softmax(x @ self.router[...])
        spread = up.shape[0] < EXPERTS
        if not spread:
            return x + self.mix(x, weights, up, down)
        weights = everywhere(weights)
        own = lax.dynamic_slice_in_dim(weights, lax.axis_index(LOCAL) * up.shape[0], up.shape[0], axis=1)
        return x + home(self.mix(everywhere(x), own, up, down))

    def mix(self, x: jax.Array, weights: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jax.nn.relu(jnp.einsum("ti,eih->teh", x, up))
        return jnp.einsum("te,teh,eho->to", weights, hidden, down)


class Model(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.blocks = zerojax.Stack(Mixture, LAYERS, rngs=rngs)
        self.last = Mixture(rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.last(self.blocks(x)))[:, 0]


def loss(model: Model, batch: Any) -> jax.Array:
    """An error, and a term of the whole batch that is no mean over rows."""
    out = model(batch["x"])
    mean = zerojax.world_sum(jnp.sum(out)) / zerojax.world_sum(jnp.float32(out.size))
    return jnp.mean(jnp.square(out - batch["y"])) + 0.3 * jnp.square(mean)


def batches(steps: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(steps, ROWS, WIDTH)).astype(np.float32)
    return [{"x": one, "y": np.sin(one.sum(-1))} for one in x]


def pure(params: Any) -> Any:
    return nnx.to_pure_dict(params)


def adamw() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, weight_decay=0.1))


@functools.cache
def plain(steps: int, devices: int, micro: int) -> tuple[list[float], Any]:
    """What an unsharded optax loop gives: the losses, and the weights by path.

    Each of ``micro`` micro-batches has its part of every device's rows, and a loss of its own.
    """

    def micro_batches(x: jax.Array) -> jax.Array:
        rows = x.reshape(devices, micro, -1, *x.shape[1:]).swapaxes(0, 1)
        return rows.reshape(micro, -1, *x.shape[1:])

    def of_batch(params: Any, batch: Any) -> jax.Array:
        def one(rows: Any) -> jax.Array:
            return loss(nnx.merge(graph, params), rows)

        return jnp.mean(lax.map(one, jax.tree.map(micro_batches, batch)))

    graph, params = nnx.split(Model(rngs=nnx.Rngs(jax.random.key(0))))
    tx = adamw()
    opt_state = tx.init(params)
    losses = []

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        value, grads = jax.value_and_grad(of_batch)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    for batch in batches(steps):
        params, opt_state, value = step(params, opt_state, batch)
        losses.append(float(value))
    return losses, pure(params)


def create(
    nodes: int, local: int, *, abstract: bool = False, preset: Preset = "zero3", **zero: Any
) -> zerojax.TrainState:
    config = zerojax.ZeroConfig.preset(preset, compute_dtype="float32", units=Mixture, **zero)
    make = zerojax.TrainState.abstract if abstract else zerojax.TrainState.create
    mesh = zerojax.make_mesh(nodes, local)
    return make(lambda rngs: Model(rngs=rngs), adamw(), loss, mesh=mesh, zero=config)


def trained(nodes: int, local: int, steps: int = 4, **zero: Any) -> tuple[list[float], zerojax.TrainState]:
    if zero.get("preset") == "local":  # which begins with more than weights
        state = create(nodes, local, **zero)
    else:
        start = pure(nnx.state(Model(rngs=nnx.Rngs(jax.random.key(0)))))
        state = started(create(nodes, local, abstract=True, **zero), start)
    losses = []
    for batch in batches(steps):
        state, metrics = zerojax.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


EXACT = {"weights": "fp32", "grads": ("fp32", "fp32")}
CASES = [
    pytest.param((2, 4), {"stage": 3}, marks=pytest.mark.slow),
    ((3, 2), {"stage": 3, "hpz": True, **EXACT, "grad_sync": "step", "accumulate": 2}),
    pytest.param((1, 8), {"stage": 2}, marks=pytest.mark.slow),
    pytest.param((2, 2), {"stage": 1, "accumulate": 2}, marks=pytest.mark.slow),
    pytest.param((4, 2), {"stage": 3, "chunks": 3}, marks=pytest.mark.slow),
    pytest.param(
        (2, 2), {"stage": 3, "accumulate": 2, "accumulate_order": "breadth"}, marks=pytest.mark.slow
    ),
    pytest.param((2, 3), {"stage": 3, "experts": "gathered"}, marks=pytest.mark.slow),
    # Five devices do not divide the experts, which are gathered.
    pytest.param((1, 5), {"stage": 3}, marks=pytest.mark.slow),
    pytest.param((2, 1), {"stage": 3}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("mesh", "zero"), CASES, ids=str)
def test_equals_an_unsharded_loop(mesh, zero):
    losses, state = trained(*mesh, **zero)
    micro = zero.get("accumulate", 1)
    wanted, params = plain(4, mesh[0] * mesh[1] if micro > 1 else 1, micro)
    np.testing.assert_allclose(losses, wanted, rtol=2e-6)
    assert distance(zerojax.gather_params(state), params) < 1e-4
    spread = zero.get("experts") != "gathered" and mesh[1] > 1 and EXPERTS % mesh[1] == 0
    parts = {leaf.parts for leaf in state.spec.leaves if leaf.path[-1] == "up"}
    assert parts == {mesh[1] if spread else 1}


def padding_of(state: zerojax.TrainState) -> dict[Any, np.ndarray]:
    """What is stored of each weight of experts at places without an element."""
    params = from_tree(state.params)
    found = {}
    for leaf in state.spec.leaves:
        if leaf.parts > 1:
            stored = np.asarray(params[leaf.path]).reshape(leaf.layers, leaf.padded)
            found[leaf.path] = stored[:, np.asarray(leaf.element_at(jnp.arange(leaf.padded))) == leaf.size]
    return found


@pytest.mark.slow
def test_quantized_it_learns_and_padding_stays_zero():
    """Blocks of 64, of which three nodes' shards of twelve experts fill none."""
    losses, state = trained(3, 2, preset="zero++", block_size=64)
    np.testing.assert_allclose(losses, plain(4, 1, 1)[0], rtol=0.05)
    assert losses[-1] < losses[0]
    padding = padding_of(state)
    assert len(padding) == 4
    assert all(x.size for x in padding.values())
    assert not any(x.any() for x in padding.values())


@pytest.mark.slow
def test_a_checkpoint_goes_to_nodes_of_other_sizes(tmp_path):
    """With its optimizer: the loss of the next step is the same."""
    _, state = trained(3, 2, steps=2)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, Record({}, {}, 1, 2.0, (3, 2), {}))
    batch = batches(3)[2]
    params = zerojax.gather_params(state)
    _, wanted = zerojax.train_step(state, batch)
    for mesh in ((2, 4), (1, 5)):
        other = restore(tmp_path / "2", create(*mesh, abstract=True))
        assert distance(zerojax.gather_params(other), params) == 0
    _, metrics = zerojax.train_step(other, batch)
    np.testing.assert_allclose(metrics["loss"], wanted["loss"], rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], wanted["grad_norm"], rtol=1e-5)


@pytest.mark.slow
def test_a_fingerprint_of_frozen_experts_is_that_of_any_mesh():
    prints = [
        int(create(*mesh, frozen=("blocks*",), frozen_weights="nf4").base["fingerprint"])
        for mesh in ((3, 2), (1, 1))
    ]
    assert prints[0] == prints[1]


@pytest.mark.slow
def test_local_updates_are_those_with_gathered_experts():
    exact: dict[str, Any] = {
        "preset": "local", "every": 2, "weights": "fp32", "grads": ("fp32", "fp32"), "rotation": 0
    }  # fmt: skip
    exact |= {"error_feedback": False, "outer_delay": 1}
    (losses, state), (wanted, other) = (trained(2, 2, **exact, experts=how) for how in ("local", "gathered"))
    np.testing.assert_allclose(losses[1:], wanted[1:], rtol=1e-5)
    assert distance(zerojax.gather_params(state), zerojax.gather_params(other)) < 1e-4


def test_refuses_what_does_not_divide():
    with pytest.raises(ZeroError, match=r'experts="local" spreads .*5 devices.*24 experts'):
        create(1, 5, experts="local")
    with pytest.raises(ZeroError, match="stage=0"):
        create(1, 2, experts="local", stage=0)


@pytest.mark.slow
def test_adapters_of_experts_are_spread_with_them():
    """Losses as on one device, and the merged weights give that of the model without adapters."""
    lora = zerojax.LoRA(rank=2, alpha=8, targets=("*up", "*down", "!last/*"))

    def run(nodes: int, local: int) -> tuple[list[float], zerojax.TrainState]:
        settings = zerojax.ZeroConfig.preset("zero3", compute_dtype="float32", units=Mixture, frozen=("*",))
        mesh, make = zerojax.make_mesh(nodes, local), lambda rngs: Model(rngs=rngs)
        state = zerojax.TrainState.create(make, optax.adam(0.05), loss, mesh=mesh, zero=settings, lora=lora)
        losses = []
        for batch in batches(3):
            state, metrics = zerojax.train_step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses, state

    (losses, state), (wanted, _) = run(3, 2), run(1, 1)
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    adapters = {leaf.path: leaf for leaf in state.spec.leaves}
    assert {(leaf.shape, leaf.parts) for leaf in adapters.values()} == {
        ((EXPERTS, WIDTH, 2), 2),
        ((EXPERTS, 2, HIDDEN), 2),
        ((EXPERTS, HIDDEN, 2), 2),
        ((EXPERTS, 2, WIDTH), 2),
    }
    batch = batches(1)[0]
    merged = float(loss(zerojax.gather_model(state), batch))
    np.testing.assert_allclose(zerojax.eval_step(state, batch)["loss"], merged, rtol=1e-5)


def test_refuses_dropout_before_experts():
    lora = zerojax.LoRA(rank=2, targets=("*up",), dropout=0.1)
    with pytest.raises(ZeroError, match=r"LoRA\.dropout=0.1 cannot be applied to 'blocks/block/up'"):
        zerojax.TrainState.abstract(
            lambda rngs: Model(rngs=rngs),
            adamw(),
            loss,
            mesh=zerojax.make_mesh(1, 2),
            zero=zerojax.ZeroConfig(units=(Mixture,), frozen=("*",)),
            lora=lora,
        )
