"""The memory of the roles before the start, against the arrays that there are."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from micro_run import micro_config

from zerojax.generation.copy import GenerationCopy
from zerojax.posttrain.roles.memory import RoleMemory
from zerojax.posttrain.roles.reference import reference_setup
from zerojax.run.build import RunSetup
from zerojax.run.config import PosttrainSection, RunConfig, with_settings
from zerojax.train.memory import device_bytes
from zerojax.train.spec import TrainSpec
from zerojax.train.step import predict_step


@pytest.fixture
def config(text: Path) -> RunConfig:
    base = micro_config(text, mesh={"nodes": 2, "local": 2})
    settings = dataclasses.replace(base.posttrain, method="grpo", kl=0.1, max_new_tokens=8, rollout_rows=16)
    return dataclasses.replace(base, posttrain=settings)


def held(state: Any) -> int:
    return device_bytes([x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)])


@pytest.mark.slow
def test_each_role_holds_what_its_arrays_hold(config: RunConfig) -> None:
    state = RunSetup(config).initial_state()
    roles = RoleMemory.of(config, state.spec)
    setup = reference_setup(config, state.spec)
    assert setup is not None
    reference = held(setup.initial_state())
    assert (roles.policy, roles.reference) == (held(state), reference)
    assert roles.generator is not None
    made = GenerationCopy.of(state.spec, "compute").make(state)
    assert (roles.generator.form, roles.generator.weights) == ("compute", device_bytes(made))
    model = config.model
    per_token = 2 * model.layers * model.key_value_heads * model.head_dim * 4  # keys and values, fp32
    assert roles.generator.slots == 4  # 16 rows on 4 devices
    assert roles.generator.cache == 4 * roles.generator.length * per_token
    tokens = roles.generator.weights + roles.generator.cache
    assert roles.rollout == roles.policy + reference + tokens


@pytest.mark.slow
def test_where_only_a_part_is_frozen_the_reference_is_what_the_policy_was(config: RunConfig) -> None:
    config = with_settings(config, {"zero": {"frozen": ("blocks/*",), "frozen_weights": "int4"}})
    policy = RunSetup(config).initial_state()
    setup = reference_setup(config, policy.spec)
    assert setup is not None
    batch = {"tokens": np.arange(4 * config.train.sequence_length).reshape(4, -1) % config.model.vocab_size}

    def logits(model: Any, batch: Any) -> jax.Array:
        return model(batch["tokens"])

    first, same = (predict_step(state, batch, logits) for state in (policy, setup.initial_state()))
    np.testing.assert_array_equal(first, same)


def test_without_room_the_weights_are_spread_and_adapters_need_no_reference(config: RunConfig) -> None:
    config = with_settings(config, {"lora": {"rank": 2}})
    spec = RunSetup(config).abstract_state.spec
    roles = RoleMemory.of(config, spec, room=0)
    assert roles.generator is not None
    assert (roles.reference, roles.generator.form) == (0, "gathered")
    adapters = GenerationCopy.of(spec, "gathered").device_bytes - held_frozen(spec)
    assert roles.generator.weights == adapters  # the base is the state's own


@pytest.mark.parametrize(("method", "beside"), [("dpo", 1), ("reward", 0)])
def test_preferences_need_no_generator(config: RunConfig, method: Any, beside: int) -> None:
    config = dataclasses.replace(config, posttrain=PosttrainSection(method=method))
    spec = RunSetup(config).abstract_state.spec
    roles = RoleMemory.of(config, spec)
    assert roles.generator is None
    assert (roles.reference is not None) == beside
    assert roles.table().row_count == 1 + beside


def held_frozen(spec: TrainSpec) -> int:
    return device_bytes({leaf.path: spec.stored(leaf, spec.strategy.frozen) for leaf in spec.frozen})
