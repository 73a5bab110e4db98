"""Weights that are other arrays after a call than before it: assigned to, or returned by a transformation."""

from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jaxtyping import Array, Num

from zerojax.adapters.nnx_creation import leaves_of
from zerojax.errors import ConfigurationError
from zerojax.schedule.origins import changed
from zerojax.schedule.sharded import assigned, is_sharded
from zerojax.sharding.param_tree import Path

_NORMALISING = (nnx.SpectralNorm, nnx.WeightNorm)
"""Layers that assign to the weights of another, for the time of a call."""


def replaced_weights(module: nnx.Module, given: Mapping[Path, object]) -> dict[Path, Num[Array, "..."]]:
    """The weights of a module that are other arrays than it was given, perhaps equal ones, by path.

    Those that layers of Flax's own replace in every call are left out.
    """
    normalising = [layer for _, layer in nnx.iter_modules(module) if isinstance(layer, _NORMALISING)]
    theirs = {id(node) for layer in normalising for _, node in nnx.iter_graph(layer)}
    # The layer that they normalise may be an attribute of another module as well.
    skipped = [path for path, node in nnx.iter_graph(module) if id(node) in theirs]
    return {
        path: value
        for path, value in leaves_of(nnx.state(module, nnx.Param))
        if path in given
        and not (is_sharded(value) or value is given[path])
        and not any(path[: len(prefix)] == tuple(map(str, prefix)) for prefix in skipped)
    }


def call_with_weights[T](
    graph: nnx.GraphDef, params: nnx.State, state: nnx.State, use: Callable[[nnx.Module], T]
) -> T:
    """Call ``use`` with a copy of a unit that has whole weights, and that is gone afterwards.

    Raises:
        ConfigurationError: the call assigned to a weight, which would be lost; the message names it.
    """
    before = jax.tree.map(lambda x: x, params)  # the copy's variables are those of ``params``
    given = dict(leaves_of(before))
    unit = nnx.merge(graph, params, state)
    result = use(unit)
    replaced = replaced_weights(unit, given)

    def left(params: nnx.State) -> list[Num[Array, "..."]]:
        again = nnx.merge(graph, params, jax.tree.map(lambda x: x, state))  # with variables of this trace
        use(again)
        found = dict(leaves_of(nnx.state(again, nnx.Param)))
        return [found[path] for path in replaced]

    if replaced:
        # Transformations of Flax return weights that nobody assigned to as other arrays: the program tells.
        jaxpr = jax.make_jaxpr(left)(before).jaxpr
        if paths := changed(jaxpr, list(given), list(replaced)):
            raise ConfigurationError(assigned("/".join(paths[0]), f"the unit {type(unit).__name__}"))
    return result
