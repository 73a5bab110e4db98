"""Which parts share a collective, and which collectives have a stream of their own."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import zerojax
from zerojax.comm.coalesced import ALONE_BYTES, exchange_together, gather_together

SMALL, LARGE = 64, ALONE_BYTES // 4
DOMAIN = "collective_communication_domain"


def lowered(run: Any, axis: str, *, separate_stream: bool, nodes: int = 2) -> str:
    """The program that sends two large and three small parts, one of them of another dtype."""
    rows = () if run is gather_together else (2,)
    parts = [jnp.zeros((*rows, n), jnp.float32) for n in (LARGE, SMALL, LARGE, SMALL)]
    parts.append(jnp.zeros((*rows, SMALL), jnp.bfloat16))
    mapped = jax.shard_map(
        functools.partial(run, axis=axis, separate_stream=separate_stream),
        mesh=zerojax.make_mesh(nodes, 2),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    return jax.jit(mapped).lower(parts).as_text()


def sizes(text: str) -> list[int]:
    """Bytes of the operand of each collective, sorted."""
    width = {"ui8": 1, "bf16": 2, "f32": 4}
    found = re.findall(r"stablehlo\.(?:all_gather|all_to_all)\"\(.*?: \(tensor<([\dx]+)x(\w+)>\)", text, re.S)
    return sorted(functools.reduce(int.__mul__, map(int, dims.split("x"))) * width[t] for dims, t in found)


@pytest.mark.parametrize("axis", ["node", "local"])
@pytest.mark.parametrize("separate_stream", [False, True])
def test_large_parts_are_gathered_alone(axis, separate_stream):
    text = lowered(gather_together, axis, separate_stream=separate_stream)
    assert sizes(text) == [2 * 4 * SMALL + 2 * SMALL, 4 * LARGE, 4 * LARGE]
    assert text.count(DOMAIN) == (3 if separate_stream and axis == "node" else 0)


@pytest.mark.parametrize("axis", ["node", "local"])
def test_large_parts_are_exchanged_alone(axis):
    text = lowered(exchange_together, axis, separate_stream=False)
    assert sizes(text) == [2 * (2 * 4 * SMALL + 2 * SMALL), 2 * 4 * LARGE, 2 * 4 * LARGE]
    assert DOMAIN not in text


@pytest.mark.parametrize("axis", ["node", "local"])
def test_what_has_a_stream_of_its_own_is_exchanged_at_once(axis):
    """XLA lets no two collectives of the same devices run at once where another stream is at work."""
    text = lowered(exchange_together, axis, separate_stream=True)
    assert sizes(text) == [2 * (2 * 4 * LARGE + 2 * 4 * SMALL + 2 * SMALL)]
    assert text.count(DOMAIN) == (1 if axis == "node" else 0)
    assert len(sizes(lowered(exchange_together, "local", separate_stream=True, nodes=1))) == 3
