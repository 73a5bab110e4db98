"""Delta's copies in fp8: the same codes on all nodes, near the masters, at scales that follow them."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from fp8_models import chosen, fp8_case, numpy_codes
from plain_loop import masters

import zerojax
from zerojax.run.checkpoints import Checkpoints, Record, restore
from zerojax.sharding.param_tree import from_tree
from zerojax.train.gathering import averaged

ROWS = 24
DELTA = zerojax.ZeroConfig.preset(
    "delta", matmul_dtype="fp8", compute_dtype="float32", rounding="nearest", rotation=0, block_size=64
).__dict__
DELTA = {key: value for key, value in DELTA.items() if key != "units"}


def averaging() -> optax.GradientTransformation:
    return optax.chain(optax.sgd(0.01), zerojax.average_weights(0.5))


@functools.cache
def spec_of(name: str = "stack", nodes: int = 2, local: int = 2, **zero: Any) -> zerojax.TrainState:
    """An abstract state, whose compiled step all tests share."""
    case = fp8_case(name)
    abstract = zerojax.TrainState.abstract(
        case.model, averaging(), case.loss, **case._rest(nodes, local, {**DELTA, **zero})
    )
    return abstract


def begin(abstract: zerojax.TrainState) -> zerojax.TrainState:
    from zerojax.train.initial import initializer

    return abstract.replace(**initializer(abstract.spec)(np.uint32(0)))


def batches(count: int) -> list[Any]:
    return fp8_case("stack").batches(ROWS, count)


def host(state: zerojax.TrainState) -> dict[str, np.ndarray]:
    flat, _ = jax.tree_util.tree_flatten_with_path((state.params, state.replicas, state.opt_state))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def replicas(state: zerojax.TrainState) -> dict[Any, tuple[Any, np.ndarray, np.ndarray, np.ndarray]]:
    """Each fp8 weight's layout, codes [layers, padded], scales [layers], and scaled masters."""
    secondary, params, found = by_scaled(state), from_tree(state.params), {}
    for path, leaf in chosen(state).items():
        codes = np.asarray(secondary[path].values).reshape(leaf.layers, leaf.padded)
        scale = np.asarray(secondary[path].scale).reshape(leaf.layers)
        master = np.asarray(params[path]).reshape(leaf.layers, leaf.padded)
        found[path] = leaf, codes, scale, master * scale[:, None]
    return found


def by_scaled(state: zerojax.TrainState) -> dict[Any, Any]:
    return state.replicas


def read(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def assert_same_on_all_nodes(state: zerojax.TrainState) -> None:
    for copy in jax.tree.leaves(state.replicas):
        seen: dict[Any, bytes] = {}
        for shard in copy.addressable_shards:
            place, bits = str(shard.index), np.asarray(shard.data).tobytes()
            assert seen.setdefault(place, bits) == bits


def check_copies(before: Any, state: zerojax.TrainState) -> None:
    """What the step that led from ``before`` (its copies, of the masters of now) left behind."""
    assert_same_on_all_nodes(state)
    for path, (leaf, codes, scale, _) in replicas(state).items():
        _, old_codes, old_scale, old_scaled = before[path]
        master = old_scaled / old_scale[:, None]
        peak = abs(master).max(1)
        fitting = np.array([2.0 ** np.floor(np.log2(448 / x)) for x in peak])
        kept = (old_scale <= fitting) & (fitting <= 4 * old_scale)
        np.testing.assert_array_equal(scale, np.where(kept, old_scale, fitting))
        base = read(numpy_codes(np.clip(read(old_codes) * (scale / old_scale)[:, None], -448, 448), 1))
        wanted = master * scale[:, None]
        step = abs(wanted - base).reshape(leaf.layers, -1, 64).max(2).repeat(64, 1) / 7
        # Half a step of int4 (scales of blocks are rounded, too), then bf16 and e4m3.
        bound = 0.55 * step + (abs(wanted) + step) * (2**-4 + 2**-8) + 2.0**-10
        assert (abs(read(codes) - wanted) <= bound).all(), leaf.name


def with_masters(state, params):
    """The state with other master weights and the copies that it has, as after an update."""
    return dataclasses.replace(state, params=params, _masters=None)


@pytest.mark.parametrize(
    "name",
    ["stack", pytest.param("list", marks=pytest.mark.slow), pytest.param("linen", marks=pytest.mark.slow)],
)
def test_copies_agree_follow_the_masters_and_their_scales(name):
    """Weights that grow or shrink tenfold between steps take their scales with them; those that hardly
    change keep theirs, however they were before."""
    abstract = spec_of(name)
    state = begin(abstract)
    for factor, batch in zip((1, 1, 10, 1.1, 1 / 30, 0.7), batches(6), strict=True):
        grown = jax.tree.map(lambda x: x * np.float32(factor), state.params)  # noqa: B023
        state = with_masters(state, grown)
        before = replicas(state)
        expected = zerojax.eval_step(state, batch)["loss"]
        state, metrics = zerojax.train_step(state, batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
        check_copies(before, state)


@pytest.mark.slow
def test_a_skipped_step_leaves_copies_of_the_masters():
    """As a good one does: the update of the copies does not depend on the batch."""
    good, bad = batches(2)
    bad = {**bad, "x": np.full_like(bad["x"], np.nan)}
    ends = []
    for first in (good, bad):
        state = begin(spec_of())
        state = with_masters(state, jax.tree.map(lambda x: x * 3, state.params))
        state, metrics = zerojax.train_step(state, first)
        assert metrics["skipped"] == (first is bad)
        ends.append(jax.tree.map(np.asarray, state.replicas))
    jax.tree.map(np.testing.assert_array_equal, *ends)
    before = replicas(state)
    state, metrics = zerojax.train_step(state, good)
    assert metrics["skipped"] == 0
    check_copies(before, state)


def assert_fresh(state: zerojax.TrainState) -> None:
    """Copies are the codes of the masters at the scale that fits them."""
    assert_same_on_all_nodes(state)
    for leaf, codes, scale, scaled in replicas(state).values():
        peak = abs(scaled).max(1) / scale
        np.testing.assert_array_equal(scale, [2.0 ** np.floor(np.log2(448 / x)) for x in peak], leaf.name)
        np.testing.assert_array_equal(codes, numpy_codes(scaled, 1), leaf.name)


@pytest.mark.slow
def test_weights_that_are_put_averaged_and_gathered():
    state = begin(spec_of())
    assert_fresh(state)
    first, batch = batches(2)
    for each in (first, batch):
        state, _ = zerojax.train_step(state, each)
    assert_fresh(averaged(state))
    put = zerojax.put_params(state, jax.tree.map(lambda x: 5 * x, zerojax.gather_params(state)))
    assert_fresh(put)
    model, case = zerojax.gather_model(state), fp8_case("stack")
    evaluated = zerojax.eval_step(state, batch)["loss"]
    np.testing.assert_allclose(case.loss(model, batch), evaluated, rtol=0.1)
    jax.tree.map(np.testing.assert_array_equal, zerojax.gather_params(state), masters(state))


def test_a_checkpoint_goes_on_bit_by_bit(tmp_path: Path):
    first, second, third = batches(3)
    state = begin(spec_of())
    for batch in (first, second):
        state, _ = zerojax.train_step(state, batch)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, Record())
    saved = host(state)
    state, _ = zerojax.train_step(state, third)
    restored = restore(tmp_path / "2", spec_of())
    jax.tree.map(np.testing.assert_array_equal, host(restored), saved)
    restored, _ = zerojax.train_step(restored, third)
    jax.tree.map(np.testing.assert_array_equal, host(restored), host(state))


BF16 = {"matmul_dtype": "compute"}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(BF16, {}, marks=pytest.mark.slow),
        pytest.param({}, BF16, marks=pytest.mark.slow),
        ({}, {"nodes": 3, "local": 2}),
        pytest.param({}, {"fp8": ("*down/kernel",)}, id="fewer weights", marks=pytest.mark.slow),
        pytest.param({"fp8": ("*down/kernel",)}, {}, id="more weights", marks=pytest.mark.slow),
        pytest.param({"weights_delta": False}, {}, id="zero++", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_checkpoint_of_other_formats_or_another_mesh(source, target, tmp_path):
    given = begin(spec_of(**source))
    given = with_masters(given, jax.tree.map(lambda x: x * 7, given.params))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, given, Record())
    moved = restore(tmp_path / "1", spec_of(**target))
    jax.tree.map(np.testing.assert_array_equal, masters(moved), masters(given))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (moved.replicas, spec_of(**target).replicas))
    assert shapes[0] == shapes[1]
    assert_same_on_all_nodes(moved)
    if "nodes" in target:  # the same codes elsewhere, of the masters before they grew
        for path, (leaf, codes, scale, _) in replicas(moved).items():
            theirs = replicas(given)[path]
            np.testing.assert_array_equal(scale, theirs[2])
            np.testing.assert_array_equal(codes[:, : leaf.size], theirs[1][:, : leaf.size])
    elif "weights_delta" in source or source != target:
        for path, copy in moved.replicas.items():
            if path not in chosen(moved):
                kept = next(leaf for leaf in moved.spec.leaves if leaf.path == path)
                master = np.asarray(from_tree(moved.params)[path]).reshape(kept.layers, kept.padded)
                np.testing.assert_array_equal(
                    np.asarray(copy.values).reshape(master.shape), master.astype(copy.values.dtype)
                )
        assert_fresh(moved)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"delta_resync": 2}, {"error_feedback": True, "grads": ("int8", "int4")}]
)
def test_resyncs_and_error_feedback(options):
    state = begin(spec_of(**options))
    for number, batch in enumerate(batches(4)):
        before = replicas(state)
        state, metrics = zerojax.train_step(state, batch)
        assert np.isfinite(metrics["loss"])
        if "delta_resync" in options and number == 2:
            for path, (leaf, codes, _, _) in replicas(state).items():
                _, _, _, scaled = before[path]
                np.testing.assert_array_equal(codes, numpy_codes(scaled, 1), leaf.name)
        else:
            check_copies(before, state)
