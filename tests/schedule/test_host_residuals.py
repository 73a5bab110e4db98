"""What a stack keeps for its backward pass, in host memory: the same bits, moved beside the matmuls."""

import dataclasses
import functools
from typing import Any

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import Block, Case, Listed, NormedModel, Stacked, regression_batch, squared_error
from cuda_clusters import compiled_gpt

import zerojax
from zerojax import aot
from zerojax.errors import ConfigurationError
from zerojax.models import GPT, GPTConfig, lm_loss
from zerojax.sharding.layers import cut_large, empty_layers, large_floats, pieces_away, uncut
from zerojax.sharding.memory import in_host
from zerojax.train.step import trace_train_step

ADAMW = optax.adamw(0.01)
HOST: Any = {"host": ("activations",)}
STACK = Case(functools.partial(Stacked, layers=5), squared_error, (), regression_batch)
NORMED = Case(functools.partial(NormedModel, stacked=True), squared_error, (), regression_batch)
SMALL = GPTConfig(
    vocab_size=40, layers=5, d_model=16, heads=2, max_seq_len=12, attention="xla", biases=False, norm="rms"
)
EXPERTS = dataclasses.replace(SMALL, experts=4, experts_per_token=2, mlp="swiglu", ffn=16)
DELTA = {"hpz": True, "weights_delta": True}
SLOW = pytest.mark.slow
BREADTH = {"accumulate": 2, "accumulate_order": "breadth"}


def trained(case: Case, mesh: tuple[int, int], zero: dict[str, Any]) -> Any:
    """Losses and weights of two steps."""
    nodes, local = mesh
    begin = case.begin if case is STACK else case.create  # with other state than weights
    state = begin(ADAMW, nodes=nodes, local=local, **zero)
    return two_steps(state, case.batches(12 if nodes == 3 else 16, 2))


def two_steps(state: zerojax.TrainState, batches: list[dict[str, np.ndarray]]) -> Any:
    losses = []
    for batch in batches:
        state, metrics = zerojax.train_step(state, batch)
        losses.append(metrics["loss"])
    return jax.tree.map(np.asarray, (losses, state.params, state.model_state))


@pytest.mark.parametrize(
    ("case", "mesh", "zero"),
    [
        pytest.param(NORMED, (3, 2), {}, id="state"),
        pytest.param(STACK, (2, 4), DELTA | {"remat": "none"} | BREADTH, id="delta", marks=SLOW),
        pytest.param(STACK, (1, 1), {}, id="one device", marks=SLOW),
        pytest.param(STACK, (2, 4), {"remat": "none"}, id="nothing recomputed", marks=SLOW),
        pytest.param(
            STACK, (3, 2), {"hpz": True, "grads": ("int8", "int4")}, id="hpZ", marks=pytest.mark.slow
        ),
        pytest.param(NORMED, (2, 4), {"remat": "none"} | BREADTH, id="breadth", marks=SLOW),
    ],
)
def test_losses_and_weights_have_the_same_bits(case, mesh, zero):
    jax.tree.map(np.testing.assert_array_equal, trained(case, mesh, zero), trained(case, mesh, zero | HOST))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "remat", "part"),
    [("packed", "attention", 1), ("experts", "none", 0.5), ("adapters", "full", 0.4)],
)
def test_so_they_have_in_every_kind_of_decoder(kind, remat, part):
    config = EXPERTS if kind == "experts" else SMALL
    tokens = np.random.default_rng(3).integers(0, 40, (8, 13)).astype(np.int32)
    batch = {"tokens": tokens}
    if kind == "packed":
        batch["segments"] = (np.arange(13) >= np.arange(8)[:, None]).astype(np.int32) + 1
    frozen: dict[str, Any] = {"frozen": ("*",)} if kind == "adapters" else {}

    def run(**more: Any) -> Any:
        state = zerojax.TrainState.create(
            lambda rngs: GPT(config, rngs=rngs),
            optax.adamw(0.01),
            lm_loss,
            mesh=zerojax.make_mesh(2, 2),
            zero=zerojax.ZeroConfig(remat=remat, **frozen, **more),
            lora=zerojax.LoRA(rank=2, dropout=0.5) if frozen else None,
        )
        return two_steps(state, [batch, batch])

    jax.tree.map(np.testing.assert_array_equal, run(), run(**HOST, host_activations=part))


def test_the_stack_of_a_step_is_in_host_memory():
    def traced(**zero: Any) -> str:
        state = zerojax.TrainState.abstract(
            STACK.model,
            optax.sgd(0.1),
            STACK.loss,
            mesh=zerojax.make_mesh(1, 1),
            zero=zerojax.ZeroConfig(**zero),
        )
        return str(trace_train_step(state, STACK.batches(64, 1)[0]).jaxpr)

    assert "f32<host>[4,64,6]" in traced(**HOST)  # of all layers but the last
    assert "<host>" not in traced()
    part = traced(**HOST, host_activations=0.5)
    assert "f32<host>[4,256]" in part
    assert "f32[4,128]" in part


def test_an_array_in_two_pieces_is_the_same_again():
    layer = {"x": jnp.arange(390.0).reshape(2, 195), "small": jnp.arange(130.0), "one": jnp.float32(3)}
    for share, away in ((0.3, 128), (0.4, 256), (0.99, 390)):
        cut = cut_large(layer, share)
        assert [piece.size for piece in jax.tree.leaves(cut["x"])] == [away] + [390 - away] * (away < 390)
        assert sum(pieces_away(cut)) == 2
        jax.tree.map(np.testing.assert_array_equal, uncut(cut), layer)


def test_activations_are_in_host_memory_and_what_is_small_on_the_device():
    layer = {
        "x": jax.ShapeDtypeStruct((4, 64), jnp.bfloat16),
        "statistics": jax.ShapeDtypeStruct((4,), jnp.float32),  # half a 16th of it: large enough
        "scale": jax.ShapeDtypeStruct((), jnp.float32),
        "choices": jax.ShapeDtypeStruct((4, 64), jnp.int32),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
    }
    assert dict(zip(sorted(layer), large_floats(layer), strict=True)) == {
        "x": True,
        "statistics": True,
        "scale": False,
        "choices": False,
        "key": False,
    }
    assert large_floats({}) == ()
    small = {name: layer[name] for name in ("scale", "x")}
    stacks = jax.eval_shape(lambda: empty_layers(small, 3, large_floats(small)))
    assert {name: in_host(x) for name, x in stacks.items()} == {"scale": False, "x": True}


@pytest.mark.parametrize(
    ("case", "zero", "words"),
    [
        (Case(Listed, squared_error, (Block,), regression_batch), {}, "stack its blocks"),
        (STACK, {"stage": 2}, "use stage 3"),
        (STACK, {"host_activations": 0.0}, "above 0"),
        (STACK, {"host": (), "host_activations": 0.5}, "needs activations in host memory"),
    ],
)
def test_without_a_stack_that_gathers_it_is_refused(case, zero, words):
    with pytest.raises(ConfigurationError, match=words):
        case.create(optax.sgd(0.1), nodes=1, local=1, **HOST | zero)


# Much more activations than weights.
DECODER = GPTConfig(
    vocab_size=256, layers=16, d_model=256, heads=4, max_seq_len=16384, attention="cudnn", biases=False
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "remat", "widths"),
    [
        ((1, 2), "full", [1]),
        ((2, 2), "full", [1]),
        ((1, 2), "none", [1, 3, 1, 1, 4]),  # a layer's input; the products; what attention returns
    ],
)
def test_on_gpus_layers_are_copied_to_the_host_and_back_beside_matmuls(mesh, remat, widths):
    def compiled(**more: Any) -> jax.stages.Compiled:
        with aot.cudnn_assumed():
            return compiled_gpt(DECODER, zerojax.ZeroConfig(remat=remat, **more), *mesh)[1]

    program = compiled(**HOST)
    text = program.as_text()
    assert text is not None
    copies = hlo.host_copies(text)
    layer = sorted(2 * DECODER.max_seq_len * DECODER.d_model * width for width in widths)
    for to_host in (True, False):
        moved = [copy for copy in copies if copy.to_host == to_host]
        # Off the loops a slice is a kernel beside the others: of the first layer that comes back.
        assert all(copy.by_dma for copy in moved if copy.count > 1)
        assert sorted({copy.bytes for copy in moved}) == sorted(set(layer))
        # Between nodes the last write is off the loop, and XLA hands on what it has written.
        layers = DECODER.layers - 1 - (mesh[0] > 1 and not to_host)
        assert sum(copy.bytes * copy.count for copy in moved) == layers * sum(layer)
        # A loop's body is two layers: half of its matmuls are a whole layer's. What a layer itself computes
        # is copied beside the rest of it.
        looped = [copy.covers for copy in moved if copy.count > 1]
        beside = max if remat == "none" and to_host else min
        assert beside(looped) > 0.3
    allocated = [name for name in text.splitlines() if "S(5)}" in name and "custom-call(" in name]
    assert len(allocated) == len(widths)
    assert all('custom_call_target="AllocateBuffer"' in name for name in allocated)
    stacks = (DECODER.layers - 1) * sum(layer)
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.host_temp_size_in_bytes == stacks
    assert hlo.memory(compiled()).temporaries - hlo.memory(program).temporaries > 0.5 * stacks
