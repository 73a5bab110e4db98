"""Which route a config asks for: the table of ``zerojax.schedule.strategy``, and what its text adds."""

import pytest

import zerojax
from zerojax.schedule.strategy import Route

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
    route = Route.of(zerojax.ZeroConfig(**zero))
    assert (route.source, route.keep, route.sink) == levels


@pytest.mark.parametrize(
    ("preset", "zero", "apart"),
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
def test_hops_between_nodes_have_a_stream_of_their_own_where_each_pass_has_one(preset, zero, apart):
    assert Route.of(zerojax.ZeroConfig.preset(preset, **zero)).way.apart == apart
