"""Abstract values are followed through every kind of equation that has programs."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from zerojax.dataflow import Analysis

NUMBERS = np.arange(3.0, dtype=np.float32)


class Sources(Analysis[frozenset[int], Counter[str]]):
    """The numbers of the arguments that a value depends on, and how often each primitive runs at most."""

    nothing = frozenset()

    def __init__(self) -> None:
        super().__init__(state=Counter())
        self.conditions: list[frozenset[int]] = []

    def join(self, values: Iterable[frozenset[int]]) -> frozenset[int]:
        return frozenset().union(*values)

    def step(self, equation: core.JaxprEqn, given: list[frozenset[int]]) -> list[frozenset[int]]:
        self.state = self.state + Counter([equation.primitive.name])
        return [self.join(given)] * len(equation.outvars)

    def decided(self, equation, condition, results):
        self.conditions.append(condition)
        return [condition | each for each in results]

    def merged(self, states):
        most = states[0]
        for state in states[1:]:
            most = most | state
        return most

    def repeated(self, equation, before):
        rounds = equation.params.get("length", 1)
        return before + Counter({name: rounds * n for name, n in (self.state - before).items()})


def followed(function: Callable[..., Any], count: int) -> tuple[list[set[int]], Sources]:
    jaxpr = jax.make_jaxpr(function)(*[jnp.float32(i) for i in range(count)]).jaxpr
    sources = Sources()
    found = sources.follow(jaxpr, [frozenset({i}) for i in range(count)])
    return [set(each) for each in found], sources


@jax.custom_jvp
def with_jvp(x, y):
    return jnp.sin(y), jnp.cos(x)


@jax.custom_vjp
def with_vjp(x, y):
    return jnp.sin(y), jnp.cos(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[::-1]))
with_vjp.defvjp(lambda x, y: (with_vjp(x, y), None), lambda _, gradients: gradients)


def shift(carry, _):
    """Values move by one place in a round, so it takes several until nothing changes."""
    first, second, third = carry
    return (jnp.sin(second), third, third), first


PROGRAMS = {
    "jit": (jax.jit(lambda x, y: (jnp.sin(y), x)), [{1}, {0}]),
    "nested": (jax.jit(lambda x, y: jax.jit(lambda a, b: (b, a))(y, x + y)), [{0, 1}, {1}]),
    "remat": (jax.checkpoint(lambda x, y: (jnp.sin(y), jnp.sin(x))), [{1}, {0}]),
    "custom_jvp": (with_jvp, [{1}, {0}]),
    "custom_vjp": (with_vjp, [{1}, {0}]),
    "constants and literals": (lambda x: (x + NUMBERS, jnp.sin(NUMBERS), 2.0), [{0}, set(), set()]),
    "cond": (
        lambda c, x, y: lax.cond(c > 0, lambda x, y: (x, 1.0), lambda x, y: (y, 2.0), x, y),
        [{0, 1, 2}, {0}],
    ),
    "scan": (
        lambda x, y, z: lax.scan(shift, (x, y, z), None, length=4),
        [{0, 1, 2}, {1, 2}, {2}, {0, 1, 2}],
    ),
    "scan of constants and slices": (
        lambda c, x, s: lax.scan(lambda x, s: (x + 1, c * s), x, NUMBERS * s),
        [{1}, {0, 2}],
    ),
    "while": (
        lambda n, x, y: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * y), (0.0, x)),
        [{0}, {0, 1, 2}],
    ),
    "while whose condition is carried": (
        lambda x, y, z: lax.while_loop(
            lambda c: c[0] < 3, lambda c: (c[0] + c[1], 2 * c[1], 2 * c[2]), (x, y, z)
        ),
        [{0, 1}, {0, 1}, {0, 1, 2}],
    ),
    "custom_linear_solve": (
        lambda x, y: lax.custom_linear_solve(lambda v: x * v, y, lambda _, b: b / 2),
        [{0, 1}],
    ),
    "reduce": (lambda x, y: lax.reduce(x * NUMBERS, y, lax.add, (0,)), [{0, 1}]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_followed(name):
    function, wanted = PROGRAMS[name]
    count = max(max(each, default=0) for each in wanted) + 1
    assert followed(function, count)[0] == wanted


def test_a_condition_is_told_apart_from_what_it_decides():
    _, sources = followed(PROGRAMS["cond"][0], 3)
    assert sources.conditions == [{0}]
    _, sources = followed(PROGRAMS["while"][0], 3)
    assert sources.conditions[-1] == {0}


def test_the_state_counts_branches_once_and_rounds_as_often_as_they_run():
    def program(x, y, z):
        x = lax.cond(x > 0, jnp.sin, lambda x: jnp.cos(jnp.sin(x)), x)
        return lax.scan(shift, (x, jax.jit(jnp.sin)(y), z), None, length=5)

    assert Counter({"sin": 1 + 1 + 5, "cos": 1, "gt": 1}).items() <= followed(program, 3)[1].state.items()
