"""The copy of the weights: what it holds, what it weighs, and that no byte of it crosses nodes afterwards."""

import dataclasses
import functools
from typing import Any, cast
from unittest import mock

import hlo
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference_codec
from flax import nnx
from generation_models import SMALL, assert_same, create, greedy, prompts
from jax.sharding import SingleDeviceSharding
from mesh_axes import axes_used
from plain_loop import by_path

import zerojax
from zerojax import aot
from zerojax.generation.copy import Form, GenerationCopy
from zerojax.generation.engine import Engine, Queue
from zerojax.generation.generate import _copy, generation_program
from zerojax.generation.sampling import Sampling
from zerojax.generation.text import _compiled, _next, _split
from zerojax.matmul import fp8
from zerojax.models import GPT, lm_loss
from zerojax.sharding.mesh import BY_ROWS
from zerojax.train.memory import device_bytes


def traced(state: zerojax.TrainState, form: Form, engine: Engine) -> Any:
    """The program that makes tokens for 16 prompts, on 8 devices."""
    copy = GenerationCopy.of(state.spec, form)
    if form == "gathered":
        engine = dataclasses.replace(engine, group="local")
    array = functools.partial(state.spec.abstract, dtype=np.int32, spec=BY_ROWS)
    arrays: Any = (array((16, 16)), *[array((16,))] * 3)
    queue = Queue(*arrays)
    seed = jax.ShapeDtypeStruct((), np.uint32)
    return generation_program(copy, engine).trace(copy.abstract, state.model_state, queue, seed)


@pytest.mark.parametrize("preset", ["zero3", "delta"])
def test_no_byte_crosses_nodes_while_tokens_are_made(preset):
    state = create(SMALL, 2, 4, abstract=True, preset=preset)
    engine = Engine(2, 1, 16, 4, 20, "float32", Sampling(), ())
    forms: dict[Form, set[str]] = {"gathered": {"local"}, "compute": set(), "int8": set()}
    for form, axes in forms.items():
        assert set(axes_used(traced(state, form, engine).jaxpr.jaxpr)) == axes


def test_the_search_for_axes_finds_the_caches_axes():
    state = create(SMALL, 2, 4, abstract=True)
    made = jax.make_jaxpr(GenerationCopy.of(state.spec, "gathered").make)(state)
    assert set(axes_used(made.jaxpr)) == {"node"}
    made = jax.make_jaxpr(GenerationCopy.of(state.spec, "compute").make)(state)
    assert set(axes_used(made.jaxpr)) == {"node", "local"}


@pytest.mark.parametrize("form", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_weights_in_8_bits_are_those_of_an_independent_codec(form):
    state = create(SMALL, 3, 2)
    rounded = {}
    for path, weight in by_path(zerojax.gather_params(state)).items():
        stack = 1 if path[0] == "blocks" else 0
        if weight.ndim - stack > 1:
            layers = weight.reshape(*weight.shape[:stack], -1).reshape(SMALL.layers if stack else 1, -1)
            padded = np.pad(layers, ((0, 0), (0, -layers.shape[1] % 64)))
            coded = reference_codec.encode(padded, form, 64)
            decoded = reference_codec.decode(coded, form, padded.shape[1], 64)
            weight = decoded[:, : layers.shape[1]].reshape(weight.shape).astype(np.float32)
        rounded[path] = weight
    model = state.spec.adapter.whole({path: jax.numpy.asarray(x) for path, x in rounded.items()}, {})
    got = zerojax.generate(state, prompts(), 5, temperature=0, weights=form)
    assert_same(got, greedy(model, prompts(), 5))


@functools.cache
def mixed() -> zerojax.TrainState:
    """A state of which a part is frozen in int8."""
    return create(SMALL, 2, 4, frozen=("*/mlp/*",), frozen_weights="int8")


@pytest.mark.slow
def test_frozen_weights_are_shared_and_the_bytes_are_counted():
    state = mixed()
    spec = state.spec
    copy = GenerationCopy.of(spec, "gathered")
    stored, frozen = copy.make(state), by_path(state.frozen)
    assert len(frozen) == 3
    for path, x in frozen.items():
        assert stored[path].values is x.values
    for form in ("gathered", "compute", "int8"):
        copy = GenerationCopy.of(spec, form)
        made, expected = copy.make(state), copy.abstract
        shapes = (jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (made, expected))
        assert next(shapes) == next(shapes)
        assert copy.device_bytes == device_bytes(made), form


@pytest.mark.parametrize("form", ["gathered", "compute"])
def test_frozen_weights_in_host_memory_are_copied_to_the_device(form: Form):
    options = {"frozen": ("*/mlp/*",), "frozen_weights": "int8"}
    held = create(SMALL, 2, 4, **options, host=("weights",))
    mine, like = (GenerationCopy.of(state.spec, form) for state in (held, mixed()))
    made = mine.make(held)
    jax.tree.map(np.testing.assert_array_equal, made, like.make(mixed()))
    assert mine.new_bytes == mine.device_bytes == device_bytes(made)


@pytest.mark.parametrize("form", ["gathered", pytest.param("int8", marks=pytest.mark.slow)])
def test_weights_that_every_node_already_has_are_shared(form: Form):
    """The copy has the same values, and nothing crosses nodes to make it."""
    state = create(SMALL, 2, 4, preset="delta")
    copied = zerojax.with_replica(state)
    copy = GenerationCopy.of(state.spec, form)
    jax.tree.map(np.testing.assert_array_equal, copy.make(copied), copy.make(state))
    assert "node" not in set(axes_used(jax.make_jaxpr(copy.make)(copied).jaxpr))


@pytest.mark.slow
def test_matrices_that_every_node_holds_are_encoded_where_they_are():
    """The copy equals the copy of a state whose optimizer does not need whole matrices."""
    state, other = create(SMALL, 2, 4, preset="delta", tx=zerojax.scale_by_muon()), create(SMALL, 2, 4)
    assert any(leaf.in_every_node for leaf in state.spec.leaves)
    copy = GenerationCopy.of(state.spec, "gathered")
    expected = {path: x.values for path, x in GenerationCopy.of(other.spec, "gathered").make(other).items()}
    for one in (state, zerojax.with_replica(state)):
        found = {path: x.values[..., : expected[path].shape[-1]] for path, x in copy.make(one).items()}
        jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_frozen_weights_that_are_spread_over_the_world_are_copied_into_every_node():
    spread = create(SMALL, 2, 4, frozen=("*/mlp/*",), frozen_weights="int8", frozen_spread="world")
    for form in ("gathered", "int8"):
        one, other = (GenerationCopy.of(state.spec, form).make(state) for state in (mixed(), spread))
        for mine, like in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
            assert mine.sharding == like.sharding
            np.testing.assert_array_equal(mine, like)


@pytest.mark.slow
def test_frozen_weights_of_few_bits_are_not_encoded_again():
    state = create(SMALL, 2, 4, frozen=("*/mlp/*",), frozen_weights="nf4")
    made, frozen = GenerationCopy.of(state.spec, "int8").make(state), by_path(state.frozen)
    assert len(frozen) == 3
    for path, weight in frozen.items():
        np.testing.assert_array_equal(made[path].values, weight.values)


def test_weights_are_whole_where_they_fit():
    spec = mixed().spec
    # A cache of 1 MiB: 2 slots, 2 layers, keys and values, one head of 4 numbers of 4 bytes.
    engine = Engine(2, 1, 16, 4, (1 << 20) // (2 * 2 * 2 * 4 * 4), "float32", Sampling(), ())
    for room, form in ((2, "compute"), (1, "gathered"), (0, "gathered")):
        assert _copy(spec, engine, "auto", room, adapters=True).form == form
    assert _copy(spec, engine, "int8", 0, adapters=True).form == "int8"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gathered", "fp8", "compute"])
def test_weights_of_fp8_products_stay_codes_unless_they_are_wanted_whole(form):
    state = create(dataclasses.replace(SMALL, d_model=16, ffn=32), 2, 4, matmul_dtype="fp8", fp8=("*/mlp/*",))
    copy, weights = GenerationCopy.of(state.spec, form), by_path(zerojax.gather_params(state))
    stored = copy.make(state)
    chosen = [path for path in stored if "mlp" in path]
    assert len(chosen) == 3
    for path in chosen:
        x = stored[path]
        assert (x.scale is None) == (form == "compute")
        values = np.asarray(x.values)
        if x.scale is not None:
            values = np.asarray(fp8.decode(x.values, np.float32)) / np.asarray(x.scale)[:, None]
        apart = values.reshape(SMALL.layers, -1) - weights[path].reshape(SMALL.layers, -1)
        assert np.abs(apart).max() < 2**-4 * np.abs(weights[path]).max()
    got = zerojax.generate(state, prompts(), 4, weights=form)
    assert (got.lengths == 4).all()


def text_program(model: GPT, engine: Engine, device: Any) -> Any:
    """The program by which an unsharded model adds a token to 16 texts."""
    graph, weights = _split(model)
    where = SingleDeviceSharding(device)
    row, one = (jax.ShapeDtypeStruct(shape, np.int32) for shape in ((16,), ()))
    queue = Queue(*cast(Any, [jax.ShapeDtypeStruct((16, 16), np.int32), row, row, row]))
    cache, key = jax.eval_shape(
        lambda: (model.init_cache(16, engine.length, jnp.dtype(engine.dtype)), jax.random.key(0))
    )
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        (weights, queue, row, *2 * [one], cache, key),
    )
    return _compiled(_next, graph, engine, zerojax.make_mesh(1, 1, devices=[device])).trace(*given)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True], ids=["state", "unsharded"])
@pytest.mark.parametrize(
    "family",
    [{"kv_heads": 2, "ffn": 1024}, {"biases": True, "norm": "layer", "mlp": "gelu"}],
    ids=["llama", "gpt"],
)
def test_neither_weights_nor_cache_are_copied_for_a_token(family, whole):
    """Compiled for H100s: matmuls read a layer's weights, and attention its cache, where they lie."""
    try:
        devices = aot.topology(2, 4, gpu="h100")
    except aot.CompilerMissingError as error:
        pytest.skip(str(error))
    sizes = {"layers": 4, "d_model": 512, "heads": 4, "kv_heads": 4, "ffn": None, "max_seq_len": 256}
    config = dataclasses.replace(SMALL, **sizes | family)
    engine = Engine(64, 1, 16, 200, 216, "bfloat16", Sampling(), ((2,),))

    def attend(query, keys, values, layer, start, stop, sinks, **_):
        """Reads a layer's columns in place, as the kernel does; its specification's matmuls copy them."""
        assert sinks is None
        columns = jnp.arange(keys.shape[3])
        seen = (start[:, None] <= columns) & (columns < stop[:, None])
        both = jnp.sum((keys[layer] + values[layer]) * seen[:, None, :, None], axis=2)
        return query + jnp.repeat(both, query.shape[1] // both.shape[1], axis=1)

    with mock.patch("zerojax.models.kv_cache.attend_cache", attend):
        if whole:
            model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
            params = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), params))
            program = text_program(model, engine, devices[0])
        else:
            mesh = zerojax.make_mesh(2, 4, devices=devices)
            state = zerojax.TrainState.abstract(
                lambda rngs: GPT(config, rngs=rngs), optax.sgd(0.1), lm_loss, mesh=mesh
            )
            program = traced(state, "compute", engine)
    text = program.lower().compile(dict(aot.COMPILER_OPTIONS)).as_text()
    # A layer's smallest weight has 512 KB, its keys have 7 MB.
    moved = [one for one in hlo.movements(text, 400_000) if not one.source.endswith("broadcast_in_dim")]
    assert not moved
