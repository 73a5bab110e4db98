"""Which mesh axes a program uses."""

from collections.abc import Iterator

from jax.extend import core

from zerojax.dataflow import equations_within


def axes_used(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Every mesh axis that a collective names, also in loops."""
    for equation in equations_within(jaxpr):
        if equation.primitive.name == "axis_index":
            continue
        named = [equation.params.get(name, ()) for name in ("axis_name", "axes")]
        for names in named:
            yield from (x for x in ((names,) if isinstance(names, str) else names) if isinstance(x, str))
