"""Ten fp32 steps of every stage against a plain optax loop on one device.

The full product of stages, meshes, models and options would take an hour to compile, and
``scripts/acceptance/equivalence.py`` runs it. The slow tests here are a covering design: each stage on each
mesh, each model at each stage, and every option at least twice. The others have every stage, model and
option once.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from core_models import CASES, HALVES
from flax import nnx
from plain_loop import Plain, distance, masters, plain_loop, plain_model

import zerojax

STAGES = (0, 1, 2, 3)
MESHES = ((1, 1), (1, 8), (2, 4), (4, 2), (8, 1), (3, 2), (1, 5))
ROWS = 240  # divides by every mesh times two micro-batches
STEPS = 10
SLOW = pytest.mark.slow

pytestmark = pytest.mark.filterwarnings("ignore:no unit is named")


@functools.cache  # an optimizer is checked once with each model
def momentum() -> optax.GradientTransformation:
    return optax.sgd(0.02, momentum=0.9)


def by_ndim(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_name(params: Any) -> Any:
    """What ``by_ndim`` finds in layers: in the reference the vectors of a stack have two dimensions."""
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x.ndim > 1 and path[-1].key not in ("bias", "scale"), params
    )


@functools.cache
def adamw(mask: Any = by_ndim) -> optax.GradientTransformation:
    """Clipping by the global norm, a schedule, and weight decay of matrices alone."""
    schedule = optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 4, 12)
    return optax.chain(optax.clip_by_global_norm(0.3), optax.adamw(schedule, weight_decay=0.2, mask=mask))


EXACT: dict[str, Any] = {"weights": "fp32", "local_weights": "fp32", "grads": ("fp32", "fp32")}
ADAM_WITHIN = {"losses_within": 1e-5, "params_within": 1e-3}


@functools.cache
def momentum_with_decay() -> optax.GradientTransformation:
    """What AdamW can't show exactly: decay by path, and a clip that is in force."""

    def decayed(path: Any, _: Any) -> bool:
        return "kernel" in jax.tree_util.keystr(path)

    mask = functools.partial(jax.tree_util.tree_map_with_path, decayed)
    return optax.chain(
        optax.clip_by_global_norm(0.3),
        optax.add_decayed_weights(0.1, mask=mask),
        optax.sgd(optax.linear_schedule(0.05, 0.01, 8), momentum=0.9),
    )


@functools.cache
def wanted(name: str, tx: Any, devices: int = 1) -> tuple[list[float], Any]:
    """What the plain loop gives. ``devices`` matters to half-precision gradients alone."""
    return plain_loop(plain_model(name), tx(), CASES[name].batches(ROWS, STEPS), slices=devices)


def found(name: str, tx: Any, nodes: int, local: int, **zero: Any) -> tuple[list[float], zerojax.TrainState]:
    case = CASES[name]
    state = case.start(tx(), plain_model(name).weights, nodes=nodes, local=local, **zero)
    losses = []
    for batch in case.batches(ROWS, STEPS):
        state, metrics = zerojax.train_step(state, batch)
        losses.append(metrics["loss"])
    return [float(loss) for loss in losses], state


def check(
    name: str,
    tx: Any,
    mesh: tuple[int, int],
    *,
    reference: Any = None,
    losses_within: float = 1e-6,
    params_within: float = 1e-5,
    **zero: Any,
) -> None:
    losses, state = found(name, tx, *mesh, **zero)
    wanted_losses, wanted_params = wanted(name, reference or tx)
    np.testing.assert_allclose(losses, wanted_losses, rtol=losses_within)
    assert distance(masters(state), wanted_params) < params_within
    assert losses[-1] < 0.99 * losses[0], "a model that does not learn would hide a wrong step"


@pytest.mark.parametrize(
    ("stage", "mesh", "name", "options"),
    [
        (0, (4, 2), "gpt-tied", {"accumulate": 2}),
        (1, (2, 4), "linen-scan", {}),
        pytest.param(1, (1, 5), "nnx", {}, marks=SLOW),
        (2, (1, 8), "linen", {}),
        (2, (3, 2), "nnx", {}),
        pytest.param(3, (1, 1), "stack", {}, marks=SLOW),
        (3, (8, 1), "awkward", {}),
    ],
    ids=str,
)
def test_stages_meshes_and_models(stage, mesh, name, options):
    check(name, momentum_with_decay, mesh, stage=stage, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "mesh"), [*itertools.product(STAGES, MESHES)], ids=str)
def test_every_stage_on_every_mesh(stage, mesh):
    check("nnx", momentum, mesh, stage=stage)


NAMES = ("stack", "linen", "linen-scan", "gpt-tied", "awkward")


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "name"), [*itertools.product(STAGES, NAMES)])
def test_every_model_at_every_stage(stage, name):
    check(name, momentum, (3, 2), stage=stage)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 3])
def test_half_precision_weights_have_full_precision_masters(stage):
    """Gradients of bf16 and fp16 leaves are rounded once per device, which sums in another order may flip."""
    losses, state = found("halves", momentum, 2, 4, stage=stage)
    wanted_losses, wanted_params = wanted("halves", momentum, 8)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}
    assert distance(masters(state), wanted_params) < 1e-5
    params = zerojax.gather_params(state)
    assert (params["block"]["down"].dtype, params["block"]["shift"].dtype) == HALVES


@pytest.mark.parametrize(
    ("name", "mesh", "stage", "options"),
    [
        pytest.param("gpt-tied", (2, 4), 3, {"remat": "attention"}, marks=SLOW),
        pytest.param("nnx", (1, 5), 1, {"accumulate": 2}, marks=SLOW),
        # Stages, meshes and accumulation are those of the exact comparison below.
        pytest.param("stack", (4, 2), 2, {"accumulate": 2}, marks=SLOW),
        ("linen", (8, 1), 3, {"accumulate": 3, "remat": "none"}),
        pytest.param("linen-scan", (1, 8), 0, {"accumulate": 2}, marks=SLOW),
        ("awkward", (2, 4), 3, {"grad_sync": "step", "accumulate": 2}),
    ],
    ids=str,
)
def test_adamw_with_mask_clip_and_schedule(name, mesh, stage, options):
    """Adam divides by the gradient's own size, so rounding of a gradient that should be zero (a key's
    bias under softmax) becomes whole steps that change no loss: parameters are compared loosely."""
    check(
        name, adamw, mesh, reference=functools.partial(adamw, by_name), stage=stage, **ADAM_WITHIN, **options
    )


@pytest.mark.parametrize(
    ("name", "mesh", "stage", "options"),
    [
        pytest.param("nnx", (2, 4), 0, {"accumulate": 2}, marks=SLOW),
        pytest.param("nnx", (3, 2), 1, {"accumulate": 2}, marks=SLOW),
        pytest.param("linen", (2, 4), 2, {"accumulate": 3}, marks=SLOW),
        ("stack", (2, 4), 3, {"accumulate": 3, "remat": "none"}),
        pytest.param(
            "gpt-tied", (4, 2), 3, {"grad_sync": "step", "accumulate": 2, "remat": "attention"}, marks=SLOW
        ),
        ("stack", (3, 2), 2, {"grad_sync": "step", "accumulate": 4}),
        ("nnx", (2, 4), 3, {"units": ()}),
    ],
    ids=str,
)
def test_decay_by_path_clip_and_schedule_exactly(name, mesh, stage, options):
    check(name, momentum_with_decay, mesh, stage=stage, **options)


BREADTH: dict[str, Any] = {"accumulate_order": "breadth"}


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        pytest.param("nnx", (2, 4), {"accumulate": 2}, marks=SLOW),
        pytest.param("stack", (2, 4), {"accumulate": 3, "remat": "none"}, marks=SLOW),
        ("stack", (3, 2), {"accumulate": 5, "hpz": True, "weights_delta": True}),
        pytest.param("stack", (1, 5), {"accumulate": 2}, marks=SLOW),
        pytest.param("linen", (4, 2), {"accumulate": 3}, marks=SLOW),
        ("linen-scan", (3, 2), {"accumulate": 2}),
        pytest.param("gpt-tied", (2, 4), {"accumulate": 3, "hpz": True, "remat": "attention"}, marks=SLOW),
        pytest.param("gpt-tied", (1, 1), {"accumulate": 4}, marks=SLOW),
        ("awkward", (8, 1), {"accumulate": 2, "grad_sync": "step"}),
        pytest.param("ragged", (2, 4), {"accumulate": 5}, marks=SLOW),
    ],
    ids=str,
)
def test_micro_batches_in_breadth(name, mesh, options):
    exact = EXACT if options.get("weights_delta") else {}
    check(name, momentum_with_decay, mesh, stage=3, **BREADTH, **exact, **options)


@pytest.mark.parametrize(
    ("mesh", "stage", "options"),
    [
        ((2, 4), 3, {"accumulate": 3}),
        pytest.param((1, 5), 0, {"accumulate": 2}, marks=SLOW),
        pytest.param((3, 2), 1, {}, marks=SLOW),
        ((8, 1), 2, {"grad_sync": "step", "accumulate": 2}),
    ],
    ids=str,
)
def test_uneven_token_counts_weigh_as_tokens(mesh, stage, options):
    """Devices and micro-batches count different numbers of rows; the reference takes one mean."""
    check("ragged", momentum, mesh, stage=stage, **options)


def test_metrics_are_means_over_tokens_and_the_global_norm():
    case = CASES["ragged"]
    plain, batch = plain_model("ragged"), case.batches(ROWS, 1)[0]
    loss, grads = jax.jit(jax.value_and_grad(plain.loss))(plain.weights, batch)
    state = case.start(momentum(), plain.weights, nodes=3, local=2, accumulate=2)
    state, metrics = zerojax.train_step(state, batch)
    assert metrics["tokens"] == batch["counted"].sum()
    assert set(metrics) == {"loss", "grad_norm", "skipped", "skipped_in_row", "tokens", "offset"}
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    slices = case.model(nnx.Rngs(0))(batch["x"])[:, 0].reshape(12, -1), batch["counted"].reshape(12, -1)
    offsets, counts = slices[0].mean(1), slices[1].sum(1)
    assert len(set(counts)) > 1
    np.testing.assert_allclose(metrics["offset"], (offsets * counts).sum() / counts.sum(), rtol=1e-5)
    assert metrics["skipped"] == metrics["skipped_in_row"] == 0
    assert int(state.step) == 1


def learned_weights(model: Any, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
    """Rows weigh as the model says, and the number of them has a name that a sum of zerojax's might have."""
    y = model(batch["x"])[:, 0]
    weights = jax.nn.sigmoid(y)
    loss = jnp.sum(weights * (y - batch["y"]) ** 2) / jnp.sum(weights)
    return loss, {"tokens": jnp.sum(weights), "count": len(y)}


def test_only_the_loss_is_differentiated_whatever_aux_has_in_it():
    case = dataclasses.replace(CASES["nnx"], loss=learned_weights)
    plain, batch = Plain(case), case.batches(ROWS, 1)[0]
    loss, grads = jax.jit(jax.value_and_grad(plain.loss))(plain.weights, batch)
    state = case.start(optax.sgd(1.0), plain.weights, nodes=1, local=1)
    state, metrics = zerojax.train_step(state, batch)
    assert metrics["count"] == ROWS
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert distance(masters(state), jax.tree.map(jnp.subtract, plain.weights, grads)) < 1e-5


MATH_MESHES = ((1, 1), (1, 8), (2, 4), (4, 2), (8, 1), (3, 2), (4, 3), (2, 1), (1, 2))
ROUTES = (
    {"hpz": True},
    {"hpz": True, "chunks": 2},
    {"grads_hops": 1},
    {"hpz": True, "weights_delta": True},
    {"hpz": True, "weights_delta": True, "grad_sync": "step", "accumulate": 2, "delta_resync": 3},
    {"chunks": 4, "accumulate": 2},
)


@pytest.mark.parametrize(
    ("mesh", "route"),
    [(mesh, ROUTES[i % len(ROUTES)]) for i, mesh in enumerate(MATH_MESHES[:-1]) if i >= 2]
    + [
        pytest.param(mesh, ROUTES[i], marks=SLOW)
        for mesh, i in (
            *(((1, 1), 0), ((1, 8), 1), ((2, 4), 4), ((1, 2), 2), ((2, 4), 3)),
            *(((2, 4), 5), ((4, 3), 4), ((1, 2), 3), ((2, 1), 3)),
        )
    ],
    ids=str,
)
def test_all_formats_fp32_are_the_exact_path(mesh, route):
    check("nnx", momentum, mesh, stage=3, **EXACT, **route)
