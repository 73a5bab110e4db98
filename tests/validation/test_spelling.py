"""Dtypes are named in short or long, or given as JAX's or numpy's. Unknown arguments get a suggestion."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from core_models import CASES, WIDTH, squared_error

import zerojax
from zerojax.analysis.gpus import find_gpu
from zerojax.analysis.plan import Cluster
from zerojax.cli.export_model import Options
from zerojax.models import GPTConfig
from zerojax.run.checkpoints import Retention
from zerojax.run.config import config_from_dict, dump_config
from zerojax.validation.spelling import dtype_name, suggests

BFLOAT16 = [
    "bfloat16",
    "bf16",
    "BF16",
    "jnp.bfloat16",
    jnp.bfloat16,
    ml_dtypes.bfloat16,
    jnp.dtype("bfloat16"),
]
FLOAT32 = ["float32", "fp32", "f32", "torch.float32", "single", jnp.float32, np.float32, np.dtype("f4")]
BOTH = [(given, "bfloat16") for given in BFLOAT16] + [(given, "float32") for given in FLOAT32]


@pytest.mark.parametrize(("given", "name"), BOTH, ids=str)
def test_every_way_to_say_it(given, name):
    assert dtype_name(given, "dtype", ("float32", "bfloat16")) == name
    zero = zerojax.ZeroConfig(compute_dtype=given)
    assert zero == zerojax.ZeroConfig(compute_dtype=name)
    assert hash(zero) == hash(zerojax.ZeroConfig(compute_dtype=name))
    assert (type(zero.compute_dtype), zero.compute_dtype) == (str, name)


@pytest.mark.parametrize(
    "given",
    ["float16", jnp.float16, "float", float, int, None, "", "bfloat", 3, [], {}, object, "f4,f4", "f4,,("],
    ids=str,
)
def test_what_is_none_of_them(given):
    with pytest.raises(zerojax.ZeroError, match=r"^compute=.* is not one of 'float32', 'bfloat16'\.$"):
        dtype_name(given, "compute", ("float32", "bfloat16"))
    with pytest.raises(
        zerojax.ZeroError, match=r"ZeroConfig.compute_dtype=.* is not one of 'float32', 'bfloat16'"
    ):
        zerojax.ZeroConfig(compute_dtype=given)


def test_wire_formats_that_are_dtypes():
    given: Any = {"weights": jnp.bfloat16, "local_weights": "float32", "grads": [np.float32, "bfloat16"]}
    zero = zerojax.ZeroConfig(**given, precise=(("*embed*", cast(Any, jnp.float32)),))
    assert (zero.weight_formats, zero.grad_formats) == (("bf16", "fp32"), ("bf16", "fp32"))
    assert zero.precise == (("*embed*", "fp32"),)
    with pytest.raises(zerojax.ZeroError, match=r"weights: .*float16.* is not one of fp32, bf16, fp8"):
        zerojax.ZeroConfig(weights=cast(Any, jnp.float16))


def test_a_state_computes_in_the_dtype_however_it_is_given():
    """Weights are sent in it: fp32 ones are not rounded."""
    sent = {}
    for given in (jnp.float32, jnp.bfloat16):
        state = CASES["nnx"].abstract(optax.sgd(0.1), nodes=2, local=2, compute_dtype=given)
        report = zerojax.comm_report(state, CASES["nnx"].batches(4, 1)[0])
        sent[given] = {c.dtype for c in report.collectives if c.phase.startswith("weights")}
    assert sent == {jnp.float32: {"float32"}, jnp.bfloat16: {"bfloat16"}}


def test_settings_files_and_options():
    config = config_from_dict({"zero": {"compute_dtype": "fp32"}})
    assert config == config_from_dict({"zero": {"compute_dtype": "float32"}})
    assert 'compute_dtype = "float32"' in dump_config(config)
    with pytest.raises(
        zerojax.ZeroError,
        match=r"zero\.compute_dtype = 'fp16' should be one of float32, bfloat16",
    ):
        config_from_dict({"zero": {"compute_dtype": "fp16"}})
    Options(Path("run"), Path("out"), dtype="bf16")
    with pytest.raises(
        zerojax.ZeroError, match="--dtype='int8' is not one of 'float32', 'float16', 'bfloat16'"
    ):
        Options(Path("run"), Path("out"), dtype="int8")


def test_a_plan_knows_them_too():
    cluster = Cluster(nodes=1, local=1, gpu=find_gpu("h100"), bandwidth=1e9)
    assert cluster.flops(jnp.float32) == cluster.flops("fp32") == cluster.flops("bf16") / 2


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_a_loss_sees_weights_in_the_compute_dtype(stage):
    """Weights in units and outside units."""
    case, seen = CASES["nnx"], {}

    def loss(model: Any, batch: Any) -> jax.Array:
        seen["no unit"] = model.first.kernel[...].dtype
        seen["unit"] = model.blocks[0](jnp.zeros((1, WIDTH), jnp.bfloat16)).dtype
        return squared_error(model, batch)

    case = dataclasses.replace(case, loss=loss)
    state = case.abstract(optax.sgd(0.1), nodes=1, local=2, stage=stage, compute_dtype="bfloat16")
    zerojax.lower_train_step(state, case.batches(2, 1)[0])
    assert seen == {"no unit": jnp.bfloat16, "unit": jnp.bfloat16}


def test_rounding_is_that_of_gradients():
    """Weights are always rounded to nearest: the loss is the same for either rounding of gradients."""
    case = CASES["nnx"]
    int8 = {"weights": "int8", "grads": ("int8", "int8"), "block_size": 64}
    losses = []
    for rounding in ("nearest", "stochastic"):
        state = case.begin(optax.sgd(0.1), nodes=2, local=1, rounding=rounding, **int8)
        losses.append(zerojax.eval_step(state, case.batches(2, 1)[0])["loss"])
    assert losses[0] == losses[1]


@suggests
def scale(x: float, *, factor: float = 2.0) -> float:
    return x * factor


@pytest.mark.parametrize(
    ("call", "arguments", "options", "message"),
    [
        (zerojax.ZeroConfig, (), {"wieghts": "int8"}, "ZeroConfig has no .*: did you mean 'weights'"),
        (zerojax.ZeroConfig.preset, ("delta",), {"acumulate": 2}, "did you mean 'accumulate'"),
        (zerojax.Trainer, (None,), {"save_evry": 2}, "Trainer has no .*: did you mean 'save_every'"),
        (zerojax.TrainState.create, (None, optax.sgd(1), None), {"mash": None}, "create has no .* 'mesh'"),
        (zerojax.TrainState.abstract, (None,) * 3, {"zeros": None}, "abstract has no .* mean 'zero'"),
        (zerojax.LoRA, (), {"rnk": 2}, "LoRA has no argument 'rnk': did you mean 'rank'"),
        (GPTConfig, (), {"layer": 2}, "GPTConfig has no argument 'layer': did you mean 'layers'"),
        (Retention, (), {"newst": 2}, "Retention has no argument 'newst': did you mean 'newest'"),
        (scale, (1.0,), {"xyzzy": 2}, "scale has no argument 'xyzzy': there are x, factor"),
    ],
)
def test_the_nearest_argument_is_suggested(call: Any, arguments: Any, options: dict[str, Any], message: str):
    with pytest.raises(TypeError, match=message):
        call(*arguments, **options)


def test_other_calls_are_as_before():
    assert scale(3.0, factor=1.0) == 3.0
    call: Any = scale
    with pytest.raises(TypeError, match="missing 1 required"):
        call()
    assert zerojax.ZeroConfig.preset("delta").replace(accumulate=2).accumulate == 2
