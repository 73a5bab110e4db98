"""Gemma 4: keys that no committed model has, refused variants, and tokens of transformers' generation."""

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from hf_models import FIXTURES
from plain_step import begin, check_step

import zerojax
from zerojax.errors import ConfigurationError
from zerojax.interop.huggingface import ModelFolder, adapter_lora, load_weights
from zerojax.interop.huggingface.families import describe_model, read_model
from zerojax.models import GPTConfig
from zerojax.models.size import attention_flops, flops_per_token, parameter_count

FOLDER = FIXTURES / "families" / "gemma4"


def values(**keys: Any) -> dict[str, Any]:
    return json.loads((FOLDER / "config.json").read_text()) | keys


def model_of(**keys: Any) -> GPTConfig:
    given = values(**keys)
    return read_model({name: x for name, x in given.items() if x != "absent"}, "config.json").model


def test_older_files_have_other_keys_for_the_same_heads():
    older = {"per_layer_config": "absent", "global_head_dim": 8, "num_global_key_value_heads": 1}
    assert model_of(**older) == model_of()
    plain = model_of(**older, attention_k_eq_v=False)  # transformers reads the number of heads only with it
    assert (plain.full_kv_heads, plain.keys_as_values, plain.full_head_width) == (None, False, 8)


def test_files_without_keys_have_the_defaults_of_transformers():
    absent = ("layer_types", "rope_parameters", "per_layer_config", "sliding_window")
    found = model_of(num_hidden_layers=6, **dict.fromkeys(absent, "absent"))
    assert found.windowed == (True,) * 5 + (False,)
    assert (found.sliding_window, found.full_head_width, found.rope_fraction) == (512, 512, 0.25)
    assert (found.rope_theta, found.rope_local_theta, found.rope_scaling) == (1e6, 1e4, "proportional")


def test_numbers_of_layers_have_as_many_digits_as_the_last():
    many = {"num_hidden_layers": 12, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2}
    model = model_of(**many, per_layer_config={name: {"head_dim": 8} for name in ("05", "11")})
    assert model == model_of(**many, per_layer_config={name: {"head_dim": 8} for name in ("5", "11")})
    assert [*describe_model(model)[1]["per_layer_config"]] == ["05", "11"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size_per_layer_input": 4}, "vocab_size_per_layer_input = 262144 is not supported"),
        ({"num_kv_shared_layers": 3}, "kv_shared_layers = 3: no earlier layer has the window"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "'full_attention' in the last"),
        ({"layer_types": ["full_attention"] * 4}, "only with 'sliding_attention' in some layers"),
        ({"per_layer_config": {"1": {"head_dim": 8}}}, "in all layers without the window, 1, 3, and"),
        ({"per_layer_config": {"1": {"hidden_size": 8}, "3": {"hidden_size": 8}}}, "per_layer_config"),
    ],
)
def test_other_variants_are_refused_by_their_keys(keys: dict[str, Any], message: str):
    with pytest.raises(ConfigurationError, match=message):
        model_of(**keys)


@pytest.mark.parametrize(
    ("keys", "period", "parameters", "flops"),
    # transformers' parameters, and 6 for each element of its torch.nn.Linear modules.
    [
        (
            {
                "num_hidden_layers": 35,
                "hidden_size": 1536,
                "intermediate_size": 6144,
                "num_key_value_heads": 1,
                "num_kv_shared_layers": 20,
                "use_double_wide_mlp": True,
            },
            5,
            4_628_569_344,
            13_676_838_912,
        ),
        (
            {
                "num_hidden_layers": 42,
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_key_value_heads": 2,
                "num_kv_shared_layers": 18,
            },
            6,
            7_463_013_376,
            27_863_285_760,
        ),
    ],
)
def test_parameters_and_flops_of_e2b_and_e4b(keys: dict[str, Any], period: int, parameters: int, flops: int):
    layers = range(1, keys["num_hidden_layers"] + 1)
    rest = {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_attention_heads": 8,
        "vocab_size": 262144, "max_position_embeddings": 131072,
        "layer_types": ["sliding_attention" if layer % period else "full_attention" for layer in layers],
    }  # fmt: skip
    model = read_model(keys | rest, "config.json").model
    assert parameter_count(model) == parameters
    assert flops_per_token(model, 8192) - round(attention_flops(model, 8192)) == flops


def test_a_model_whose_last_layer_has_the_window_is_not_described():
    model = replace(model_of(), sliding_window_pattern=None, sliding_window_layers=(1, 3))
    with pytest.raises(ConfigurationError, match="the last one has none"):
        describe_model(model)


def test_imported_adapters_divide_the_columns_of_each_kind():
    lora = adapter_lora(FIXTURES / "adapters" / "gemma4", model_of())
    pieces = [(pattern, columns, rank) for pattern, columns, rank, _ in lora.pieces if "qkv" in pattern]
    local, full = (f"blocks/{number}/*attention/qkv/kernel" for number in (0, 1))
    assert pieces == [(local, 16, 2), (local, 8, 2), (local, 8, 2), (full, 32, 2), (full, 8, 2)]


@pytest.mark.parametrize(
    ("name", "expected"),
    # model.generate(tokens, do_sample=False, max_new_tokens=12); the least margin of a choice is 0.01.
    [
        # It has caches of both widths, which later layers read, and an input for each layer.
        ("gemma4-e2b", ([74, 74, 47, *[54] * 9], [18] * 12)),
        pytest.param(
            *("gemma4", ([79, 13, 13, 13, 79, *[33] * 7], [64, 52, 52, 52, 65, 71, *[51] * 6])),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("gemma4-moe", ([51, 61, 61, 4, 4, 4, *[53] * 6], [48, 48, 48, 48, *[9] * 8])),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_generation_gives_the_greedy_tokens_of_transformers(name: str, expected: tuple[list[int], ...]):
    folder = FOLDER.with_name(name)
    model = ModelFolder.open(folder).model
    state = begin(model, (1, 2), optax.sgd(0.1))
    tokens = np.load(folder / "expected.npz")["tokens"]
    found = zerojax.generate(load_weights(state, folder), list(tokens), 12, temperature=0).tokens
    assert found.tolist() == list(expected)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ((2, 2), {}),
        pytest.param((1, 1), {}, marks=pytest.mark.slow),
        pytest.param((2, 4), {"experts": "local"}, marks=pytest.mark.slow),
        pytest.param((3, 2), {"hpz": True, "weights_delta": True}, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_experts_beside_an_mlp_is_that_of_plain_jax(mesh: tuple[int, int], options: dict[str, Any]):
    config = GPTConfig(
        layers=1, d_model=24, heads=2, vocab_size=80, max_seq_len=16, norm="rms", positions="rope",
        mlp="geglu", biases=False, post_norms=True, experts=4, ffn=12, shared_ffn=20, shared_norms=True,
        balance_loss=0.0, init_std=0.2,
    )  # fmt: skip
    batch = {"tokens": jax.random.randint(jax.random.key(1), (24, 13), 0, 80)}
    check_step(config, mesh, batch, **options)
