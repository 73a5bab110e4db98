"""The sharding strategy of a config: the table of ``zerojax.sharding.strategy``, and what its text adds."""

import pytest

import zerojax
from zerojax.sharding.strategy import ShardingStrategy

DELTA = {"hpz": True, "weights_delta": True}
STEP = {"grad_sync": "step"}
BREADTH = {"accumulate_order": "breadth"}


@pytest.mark.parametrize(
    ("zero", "levels"),
    [
        ({"stage": 0}, ("full", "full", "full")),
        ({"stage": 1}, ("full", "full", "full")),
        ({"stage": 2}, ("full", "full", "primary")),
        ({}, ("primary", "primary", "primary")),
        ({"hpz": True}, ("primary", "secondary", "primary")),
        (DELTA, ("secondary", "secondary", "primary")),
        (STEP, ("primary", "primary", "primary")),
        ({**STEP, "accumulate": 2}, ("primary", "primary", "secondary")),
        ({**STEP, **BREADTH, "accumulate": 2}, ("primary", "primary", "primary")),
        ({**STEP, "error_feedback": True, "grads": ("int8", "int8")}, ("primary", "primary", "secondary")),
        ({"stage": 2, **STEP, "accumulate": 2}, ("full", "full", "secondary")),
    ],
    ids=str,
)
def test_where_weights_begin_and_gradients_end(zero, levels):
    strategy = ShardingStrategy.of(zerojax.ZeroConfig(**zero))
    assert (strategy.source, strategy.keep, strategy.grad_level) == levels


@pytest.mark.parametrize(
    ("preset", "zero", "separate_stream"),
    [
        ("zero3", {}, False),
        ("zero++", {}, True),
        ("zero++", {"chunks": 2}, False),
        ("zero++", {"grads": ("bf16", "int4")}, False),
        ("delta", {}, True),
        ("delta", {"accumulate": 2}, False),
        ("delta", {"accumulate": 2, **BREADTH}, True),
    ],
    ids=str,
)
def test_hops_between_nodes_have_a_stream_of_their_own_where_each_pass_has_one(preset, zero, separate_stream):
    assert ShardingStrategy.of(zerojax.ZeroConfig.preset(preset, **zero)).separate_stream == separate_stream
