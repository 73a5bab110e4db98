"""Families with layers of several kinds: keys that no committed model has, and training steps."""

import json
from dataclasses import replace
from typing import Any

import optax
import pytest
from hf_models import FIXTURES
from plain_step import distance_of_a_step, packed_batch

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface.families import read_model
from zerojax.models import GPT, GPTConfig, lm_loss

FAMILIES = FIXTURES / "families"


def values(name: str) -> dict[str, Any]:
    return json.loads((FAMILIES / name / "config.json").read_text())


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"intermediate_size": 12288}, 8192),  # LFM2-1.2B
        ({"intermediate_size": 10240, "block_ffn_dim_multiplier": 1.0}, 6912),
        ({"intermediate_size": 30, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.5}, 32),
    ],
)
def test_the_width_of_lfm2_is_rounded_as_its_files_say(keys, width):
    given = values("lfm2") | {"block_auto_adjust_ff_dim": True} | keys
    assert read_model(given, "config.json")[1].ffn == width


def test_layers_follow_from_other_keys_without_layer_types():
    given = values("lfm2")
    del given["layer_types"]
    assert read_model(given, "config.json")[1].recurrent_layers == (0, 2)
    given = values("qwen3-5") | {"num_hidden_layers": 8}
    del given["layer_types"]
    assert read_model(given, "config.json")[1].recurrent_layers == (0, 1, 2, 4, 5, 6)
    given |= {"full_attention_interval": 2}
    assert read_model(given, "config.json")[1].recurrent_layers == (0, 2, 4, 6)


def test_positions_of_images_are_not_needed_for_text():
    given = values("qwen3-5")
    given["rope_parameters"] |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert read_model(given, "config.json")[1] == read_model(values("qwen3-5"), "config.json")[1]


def test_other_kinds_of_layers_are_refused():
    with pytest.raises(ConfigurationError, match=r"layer_types = .* are supported"):
        read_model(values("qwen3-5") | {"layer_types": ["linear_attention", "moe"]}, "config.json")


TRAINED = (
    *("qwen3-5", "lfm2-moe", "qwen3-next", "qwen3-5-moe", "olmo-hybrid", "bamba"),
    *("granitemoehybrid", "minimax-m2", "glm4-moe-lite"),
)
"""Fixtures of families. The first is trained in every run of the tests, the others in the slow ones."""


def model_of(name: str) -> GPTConfig:
    """Without the routers' losses, which are sums over a device's tokens."""
    return replace(read_model(values(name), "config.json")[1], balance_loss=0.0)


def slow_after(count: int, *cases: Any) -> list[Any]:
    """Marks cases from a number on."""
    return [pytest.param(*case, marks=pytest.mark.slow if n >= count else ()) for n, case in enumerate(cases)]


@pytest.mark.parametrize(
    ("name", "mesh"), slow_after(1, *((name, mesh) for name in TRAINED for mesh in ((2, 4), (3, 2))))
)
def test_a_step_of_zero3_is_that_of_plain_jax(name, mesh):
    assert distance_of_a_step(model_of(name), mesh, {}) < 2e-5


@pytest.mark.parametrize("name", slow_after(0, *((name,) for name in TRAINED)))
def test_delta_learns(name):
    config = model_of(name)
    state = zerojax.TrainState.create(
        lambda rngs: GPT(config, rngs=rngs),
        optax.adam(3e-3),
        lm_loss,
        mesh=zerojax.make_mesh(2, 2),
        zero=zerojax.ZeroConfig.preset("delta"),
    )
    losses = []
    for _ in range(8):
        state, metrics = zerojax.train_step(state, packed_batch(config))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05, losses
