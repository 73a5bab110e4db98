"""Which mesh axes a program uses."""

from collections.abc import Iterator

from jax.extend import core


def axes_used(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Every mesh axis that a collective names, also in loops."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "axis_index":
            continue
        named = [equation.params.get(name, ()) for name in ("axis_name", "axes")]
        for names in named:
            yield from (x for x in ((names,) if isinstance(names, str) else names) if isinstance(x, str))
        for inner in core.jaxprs_in_params(equation.params):
            if equation.primitive.name != "shard_map" or inner is not jaxpr:
                yield from axes_used(inner)
