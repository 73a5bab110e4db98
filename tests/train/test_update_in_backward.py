"""Layers updated in their backward pass: the same steps as with an update after it, and what is refused."""

import functools
import re
from collections.abc import Callable
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cuda_clusters import gpt_batch
from flax import nnx
from jax import lax
from jax.sharding import Mesh

import zerojax
from zerojax import aot
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import LoRA
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.sharding.layers import layer_at
from zerojax.sharding.memory import in_host, to_host
from zerojax.train import step
from zerojax.train.state import TrainState
from zerojax.zero_config.config import Preset, ZeroConfig

WIDTH = 16
# Powers of two: products with them are exact, whether or not the compiler fuses them with a sum.
EXACT = optax.adamw(2.0**-7, b1=0.5, b2=0.5, weight_decay=2.0**-5)
BREADTH = {"accumulate": 2, "accumulate_order": "breadth"}
COUNTING = optax.GradientTransformation(
    lambda params: {"seen": jax.tree.map(lambda x: x.astype(jnp.int32), params)},
    lambda updates, state, params=None: (updates, state),
)
SLOW = pytest.mark.slow


@jax.custom_vjp
def poisoned(x: jax.Array, bad: jax.Array) -> jax.Array:
    """``x``, whose gradient is not finite if ``bad`` is not 0."""
    del bad
    return x


poisoned.defvjp(lambda x, bad: (x, bad), lambda bad, ct: (jnp.where(bad > 0, jnp.inf, ct), None))


class Block(nnx.Module):
    """A residual layer."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, bad: jax.Array | float = 0.0) -> jax.Array:
        return poisoned(x + self.down(jnp.tanh(self.up(self.norm(x)))), jnp.asarray(bad))


class Model(nnx.Module):
    """Two stacks, and weights outside of units."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.blocks = zerojax.Stack(Block, layers, rngs=rngs)
        self.short = zerojax.Stack(Block, 2, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x: jax.Array, bad: jax.Array | None = None) -> jax.Array:
        by_layer = None if bad is None else {"bad": bad}
        return self.head(self.short(self.blocks(x, by_layer=by_layer)))


def error(out: jax.Array, batch: Any) -> jax.Array:
    return jnp.mean((out - batch["y"]) ** 2)


def loss(model: Model, batch: Any) -> jax.Array:
    return error(model(batch["x"], batch.get("bad")), batch)


def batch_of(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    x, y = rng.standard_normal((24, WIDTH)), rng.standard_normal((24, 3))
    if number == 1:
        y[0] = np.nan  # a step that is skipped
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def created(
    mesh: tuple[int, int] = (1, 1),
    preset: Preset = "zero3",
    layers: int = 3,
    *,
    tx: Any = EXACT,
    loss_fn: Any = loss,
    lora: LoRA | None = None,
    spikes: zerojax.SpikeRule | None = None,
    backward: bool = True,
    create: Any = TrainState.create,
    **options: Any,
) -> TrainState:
    zero = ZeroConfig.preset(
        preset, **{"host": ("optimizer",), "update_in_backward": backward, "block_size": 64} | options
    )
    make = functools.partial(Model, layers)
    where = zerojax.make_mesh(*mesh)
    seed = {"seed": 1} if create == TrainState.create else {}
    return create(make, tx, loss_fn, mesh=where, zero=zero, lora=lora, spikes=spikes, **seed)


def trained(state: TrainState, steps: range = range(3)) -> tuple[TrainState, list[list[float]]]:
    told = []
    for number in steps:
        state, metrics = zerojax.train_step(state, batch_of(number))
        told.append([float(metrics[name]) for name in ("loss", "skipped", "grad_norm")])
    return state, told


def assert_near(share: float, x: jax.Array, y: jax.Array) -> None:
    one, other = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert np.linalg.norm(one - other) <= share * np.linalg.norm(other)


def arrays(state: TrainState) -> Any:
    return jax.tree.map(np.asarray, (state.params, state.opt_state, state.encoded, state.replicas))


@pytest.mark.parametrize(
    ("mesh", "preset", "layers", "options"),
    [
        # The loop over turns of two layers is there from 5 layers on, with hops between nodes from 8 on.
        ((1, 1), "zero3", 6, BREADTH),
        ((2, 2), "zero3", 1, {"state_spread": "node"}),  # a gradient's shard is in both nodes
        pytest.param((2, 2), "delta", 8, BREADTH, marks=SLOW),
        pytest.param((1, 2), "zero3", 7, {"host": ("optimizer", "weights")}, marks=SLOW),
        pytest.param((1, 1), "zero3", 1, {"moments": "bfloat16"}, marks=SLOW),
        pytest.param((1, 1), "zero3", 3, {"moments": "float8"}, marks=SLOW),
        pytest.param((1, 2), "zero3", 2, {"remat": "none"}, marks=SLOW),
        pytest.param((2, 4), "zero3", 9, {}, marks=SLOW),
        pytest.param((2, 2), "zero++", 1, {}, marks=SLOW),
        pytest.param((3, 2), "zero++", 9, {"host": ("optimizer", "weights")}, marks=SLOW),
        pytest.param((2, 2), "delta", 3, {"host": ("optimizer", "weights", "activations")}, marks=SLOW),
        pytest.param((2, 2), "zero3", 4, {"grads_hops": 1}, marks=SLOW),
        pytest.param((2, 2), "zero++", 8, {"matmul_dtype": "fp8"}, marks=SLOW),
        pytest.param((1, 2), "zero3", 6, {"lora": LoRA(rank=4), "frozen": ("*/kernel",)}, marks=SLOW),
    ],
)
def test_steps_are_those_of_an_update_after_the_passes(mesh, preset, layers, options):
    after, told = trained(created(mesh, preset, layers, backward=False, **options))
    state, also = trained(created(mesh, preset, layers, **options))
    np.testing.assert_allclose(told, also, rtol=1e-5)
    assert [skipped for _, skipped, _ in told] == [0, 1, 0]
    if mesh != (1, 1):  # compiled for tests, a few gradients are rounded to another bf16 number in the loop
        jax.tree.map(functools.partial(assert_near, 1e-4), after.params, state.params)
        jax.tree.map(functools.partial(assert_near, 1e-3), after.opt_state, state.opt_state)
    else:
        jax.tree.map(np.testing.assert_array_equal, arrays(after), arrays(state))


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint_and_begins_with_one_of_another(tmp_path):
    plain, state = created(layers=2, backward=False), created(layers=2)
    with Checkpoints(tmp_path / "plain") as checkpoints:
        checkpoints.save(1, plain, Record())
    begun = arrays(state)
    state, _ = trained(state, range(1))
    with Checkpoints(tmp_path / "own") as checkpoints:
        checkpoints.save(1, state, Record())
    jax.tree.map(np.testing.assert_array_equal, arrays(restore(tmp_path / "plain" / "1", state)), begun)
    again = restore(tmp_path / "own" / "1", state)
    state, told = trained(state, range(2, 3))
    again, also = trained(again, range(2, 3))
    assert told == also
    jax.tree.map(np.testing.assert_array_equal, arrays(again), arrays(state))


@pytest.mark.slow
def test_skipped_steps():
    """A spike changes nothing; a gradient that is not finite stops the updates at its layer, and says so."""

    def batch(bad: int, scale: float = 1.0) -> dict[str, Any]:
        flags = zerojax.Replicated((np.arange(6) == bad).astype(np.float32))
        return {name: scale * x for name, x in batch_of(0).items()} | {"bad": flags}

    state = created(layers=6, spikes=zerojax.SpikeRule(4, window=2))
    for _ in range(2):
        state, _ = zerojax.train_step(state, batch(-1))
    before = arrays(state)
    state, metrics = zerojax.train_step(state, batch(-1, 30))
    assert int(metrics["spike"]) == int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, arrays(state), before)

    state, metrics = zerojax.train_step(state, batch(2))
    assert np.isfinite(metrics["loss"])
    assert not np.isfinite(metrics["grad_norm"])
    assert (int(metrics["skipped"]), int(metrics["spike"]), int(state.skipped_in_row)) == (1, 0, 2)
    assert {int(x) for x in jax.tree.leaves(state.opt_state) if not x.ndim} == {2}
    (then, *_), (now, *_) = before, arrays(state)
    changed = now["blocks"]["block"]["up"]["kernel"] != then["blocks"]["block"]["up"]["kernel"]
    assert changed.reshape(6, -1).any(1).tolist() == [False, False, False, True, True, True]
    assert (now["short"]["block"]["up"]["kernel"] != then["short"]["block"]["up"]["kernel"]).all()
    np.testing.assert_array_equal(now["head"]["kernel"], then["head"]["kernel"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"host": ()}, "optimizer"),
        ({"stage": 2}, "stage 3"),
        ({"accumulate": 2}, 'accumulate_order="breadth"'),
        ({"grad_sync": "step", "error_feedback": True}, "error_feedback=False"),
        ({"every": 4}, "every"),
        ({"tx": optax.chain(optax.clip_by_global_norm(1.0), EXACT)}, "norms of gradients"),
        ({"tx": zerojax.chain(zerojax.scale_by_muon(), optax.scale(-1e-3))}, "as Muon does"),
        ({"tx": COUNTING}, r"\['seen'\].* is int32"),
        ({"frozen": ("blocks/*", "short/*")}, "has none"),
    ],
)
def test_refuses_what_does_not_go_with_it(options, words):
    with pytest.raises(ConfigurationError, match=words):
        created(**options)


def called_twice(model: Model, x: jax.Array) -> jax.Array:
    return model.head(model.short(model.blocks(model.blocks(x))))


def called_by_a_copy(model: Model, x: jax.Array) -> jax.Array:
    return model(x) + nnx.clone(model)(2 * x)


def in_a_loop(model: Model, x: jax.Array) -> jax.Array:
    axes = nnx.StateAxes({...: None})
    run = nnx.scan(lambda stack, x: stack(x), in_axes=(axes, nnx.Carry), out_axes=nnx.Carry, length=2)
    return model.head(model.short(run(model.blocks, x)))


def in_one_branch(model: Model, x: jax.Array) -> jax.Array:
    choose = jnp.ones(()) > 0
    return model.head(model.short(nnx.cond(choose, lambda m, x: m(x), lambda m, x: x, model.blocks, x)))


def mapped(model: Model, x: jax.Array) -> jax.Array:
    return nnx.vmap(lambda model, x: model(x), in_axes=(None, 0))(model, x)


def one_never(model: Model, x: jax.Array) -> jax.Array:
    return model.head(model.blocks(x))


def transformed(model: Model, x: jax.Array) -> jax.Array:
    return model.head(model.short(jax.checkpoint(lambda x: model.blocks(x))(x)))


def with_gradient(model: Model, x: jax.Array) -> jax.Array:
    inner = jax.grad(lambda x: jnp.sum(nnx.clone(model).blocks(x)))(x)
    return model.head(model.short(x + inner))


def with_penalty(model: Model, x: jax.Array) -> jax.Array:
    return model(x) + zerojax.weight_sum(model)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (called_twice, "'blocks/block' more than once"),
        (called_by_a_copy, "'blocks/block' more than once"),
        (in_a_loop, "'blocks/block' more than once"),
        (in_one_branch, "one branch"),
        (mapped, "nnx.vmap"),
        (one_never, "does not call the Stack 'short/block'"),
        (transformed, "a function that JAX transforms"),
        (with_gradient, "contains a gradient"),
        (with_penalty, "weight_sum"),
    ],
)
def test_refuses_losses_whose_gradients_are_not_final_there(
    run: Callable[[Model, jax.Array], jax.Array], words: str
) -> None:
    state = created(
        layers=2,
        loss_fn=lambda model, batch: error(run(model, batch["x"]), batch),
        create=TrainState.abstract,
    )
    with pytest.raises(ConfigurationError, match=words):
        step.lower_train_step(state, batch_of(0))


DECODER = GPTConfig(
    vocab_size=256, layers=14, d_model=512, heads=4, max_seq_len=512, mlp="swiglu", attention="cudnn"
)


def compiled_on(mesh: Mesh, **options: Any) -> tuple[TrainState, jax.stages.Compiled]:
    """A step that allocates masters and moments in host memory: described devices have no such inputs."""
    zero = ZeroConfig(host=("optimizer",), **options)
    state = TrainState.abstract(
        lambda rngs: GPT(DECODER, rngs=rngs), optax.adamw(1e-3), lm_loss, mesh=mesh, zero=zero
    )

    def allocated(x: jax.ShapeDtypeStruct) -> jax.Array:
        return to_host(lax.empty(x.shape, x.dtype)) if x.ndim else jnp.zeros((), x.dtype)

    def run(own: TrainState, batch: Any) -> Any:
        host = jax.tree.map(allocated, {"params": state.params, "opt_state": state.opt_state})
        after, metrics = step._train(
            own.replace(**host, encoded=dict(own.encoded)), {"frozen": {}, "replicas": {}}, batch
        )
        left = [x for x in jax.tree.leaves((after.params, after.opt_state)) if in_host(x)]
        return after.encoded, metrics, [jnp.sum(layer_at(x, 0)) for x in left]

    own = state.replace(params={}, opt_state={}, encoded=dict(state.encoded))
    batch = step.abstract_batch(state.spec, gpt_batch(DECODER, zero.accumulate))
    with aot.cudnn_assumed():
        jitted = jax.jit(run, donate_argnums=0, compiler_options=step._compiler_options(state.spec))
        return state, jitted.lower(own, batch).compile(dict(aot.COMPILER_OPTIONS))


@SLOW
@pytest.mark.parametrize("options", [{}, {"accumulate": 4, "accumulate_order": "breadth"}])
def test_on_gpus_the_state_is_copied_beside_the_layers(cuda_mesh, options):
    """By copy engines, from one layer's update to the next one's; and there is no stack of gradients."""
    mesh = cuda_mesh(1, 1)  # skips without a compiler
    state, program = compiled_on(mesh, update_in_backward=True, **options)
    _, after = compiled_on(mesh, **options)
    text = program.as_text()
    assert text is not None
    replicas = [copy for copy in hlo.host_copies(text) if copy.bytes > 2**16]
    looped = [copy for copy in replicas if copy.count > 1]
    # Those of layers that are peeled off, too; outside the passes the test itself reads some.
    assert all(copy.by_dma for copy in replicas if copy.to_host or copy in looped)
    # A loop's body is two layers.
    assert {copy.to_host for copy in looped} == {True, False}
    assert all(copy.covers >= 0.2 for copy in looped)
    # What is in no stack comes when the passes are done, not to stay for all of the step.
    embedding = 4 * DECODER.vocab_size * DECODER.d_model
    fetched = [n for n, copy in enumerate(replicas) if copy.bytes == embedding and not copy.to_host]
    assert fetched
    assert min(fetched) > max(n for n, copy in enumerate(replicas) if copy.count > 1)
    held = jax.tree.leaves((state.params, state.opt_state))
    memory, before = program.memory_analysis(), after.memory_analysis()
    assert memory is not None
    assert before is not None
    # The stacks are changed in place.
    assert memory.host_temp_size_in_bytes <= sum(x.size * x.dtype.itemsize for x in held)
    stacked = jax.tree.leaves(state.params["blocks"])
    saved = before.temp_size_in_bytes - memory.temp_size_in_bytes
    assert saved > 0.5 * sum(x.size * x.dtype.itemsize for x in stacked)
    layers, largest = DECODER.layers, max(x.size // DECODER.layers for x in stacked)
    gradients = re.compile(rf"f32\[{layers},{largest}(,1)*\]{{[\d,]*}}")  # what is in host memory says so
    assert not gradients.search(text)
    assert gradients.search(str(after.as_text()))
