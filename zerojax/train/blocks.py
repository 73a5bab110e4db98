"""This device's blocks of the parameters, and hops over all of them, group by group."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Num

from zerojax.comm.reduction import GradientReduction
from zerojax.sharding.layers import layer_at, put_layer
from zerojax.sharding.layout import ParamLayout, Values, in_a_row
from zerojax.sharding.mesh import LOCAL
from zerojax.sharding.param_tree import Path
from zerojax.sharding.wire_format import Seed, mix
from zerojax.train.spec import ParamGroup, TrainSpec

Blocks = dict[Path, Num[Array, "..."]]
type _Hop = Callable[[GradientReduction, Values, Seed, Values | None], tuple[Values, Values | None]]
"""A method of ``GradientReduction`` that sums over nodes; see ``reduce_node``."""


def flat_blocks(blocks: Blocks, leaves: Sequence[ParamLayout]) -> Blocks:
    """This device's stored blocks without the trailing ones of their shapes: ``[n]``, or ``[layers, n]``."""
    return {leaf.path: blocks[leaf.path].reshape(*leaf.stack, -1) for leaf in leaves}


def stored_blocks(blocks: Blocks, leaves: Sequence[ParamLayout]) -> Blocks:
    """Undo ``flat_blocks``: restore the rank of each block's leaf."""
    return {
        leaf.path: blocks[leaf.path].reshape(*blocks[leaf.path].shape, *(1,) * (len(leaf.shape) - 1))
        for leaf in leaves
    }


def without_padding(
    leaf: ParamLayout, block: Num[Array, "..."], axes: str | tuple[str, ...] = ()
) -> Num[Array, "..."]:
    """A block with zeros in the padding behind its parameter.

    ``axes`` are the mesh axes over which the block is spread, by default the owners of the master weight. A
    rotation spreads rounding errors over 32 neighbours, and some of these may be padding. Left there, errors
    would grow in the master weights and affect their scales and the gradient's norm.
    """
    if not leaf.rotation or leaf.padded == leaf.size:
        return block
    first = lax.axis_index(axes or leaf.owners) * block.shape[-1]
    inside = leaf.element_at(first + jnp.arange(block.shape[-1])) < leaf.size
    return jnp.where(inside, block, 0)


def to_owners(spec: TrainSpec, grads: Blocks, residual: Blocks, seed: Seed) -> tuple[Blocks, Blocks]:
    """Send gradients over the hops that are made once per step.

    ``grads`` are sums at ``grad_level``. ``residual`` is stored, with error feedback, else empty.

    Returns:
        The sums over all devices, stored like the parameters; and the next residuals, stored.
    """
    lost = flat_blocks(residual, spec.leaves) if residual else {}

    def reduce(reduction: GradientReduction, own: Seed, whole: Values) -> Values:
        sums = reduction.reduce(whole, own)
        return reduction.all_gather_sum(sums) if spec.zero.stage == 0 else sums

    if spec.strategy.grad_level == "full":
        grads = reduce_by_group(spec, reduce, grads, seed=seed)
    elif spec.strategy.grad_level == "secondary":
        grads, lost = _take_hop(spec, GradientReduction.reduce_node, grads, lost, seed)
    if not spec.strategy.sums_in_pass:
        grads, lost = _to_all_nodes(spec, grads, lost, seed)
    leaves = [leaf for leaf in spec.leaves if leaf.path in grads]
    grads = {leaf.path: without_padding(leaf, grads[leaf.path]) for leaf in leaves}
    lost = {
        leaf.path: without_padding(leaf, lost[leaf.path], LOCAL).reshape(residual[leaf.path].shape)
        for leaf in spec.leaves
        if leaf.path in lost
    }
    return stored_blocks(grads, leaves), lost


def _to_all_nodes(spec: TrainSpec, sums: Blocks, residual: Blocks, seed: Seed) -> tuple[Blocks, Blocks]:
    """Send the owners' sums to all nodes, for parameters whose master weights every node holds."""
    mine = {leaf.path: sums[leaf.path] for leaf in spec.leaves if leaf.in_every_node}
    kept = {path: residual[path] for path in mine} if residual else {}
    everywhere, kept = _take_hop(spec, GradientReduction.to_all_nodes, mine, kept, seed)
    return sums | everywhere, residual | kept


def _take_hop(
    spec: TrainSpec, hop: _Hop, sums: Blocks, residual: Blocks, seed: Seed
) -> tuple[Blocks, Blocks]:
    """Send the gradients of all groups over a hop. With error feedback ``residual`` has the same paths."""

    def exactly(reduction: GradientReduction, own: Seed, values: Values) -> Values:
        return hop(reduction, values, own, None)[0]

    def with_feedback(
        reduction: GradientReduction, own: Seed, values: Values, residuals: Values
    ) -> Sequence[tuple[Array, Array]]:
        arrived, kept = hop(reduction, values, own, residuals)
        return list(zip(arrived, kept or residuals, strict=True))

    if not residual:
        return reduce_by_group(spec, exactly, sums, seed=seed), residual
    both = reduce_by_group(spec, with_feedback, sums, residual, seed=seed)
    return {path: x for path, (x, _) in both.items()}, {path: r for path, (_, r) in both.items()}


def by_group(
    spec: TrainSpec, hop: Callable[..., Sequence[Any]], *values: Mapping[Path, Any]
) -> dict[Path, Any]:
    """Run ``hop(*values)`` for each group of weights that travel together, layer by layer for stacked ones.

    The hop takes tuples with one value for each weight of a group, and returns as many. Weights that have no
    entry in the first of the values are left out.
    """
    return _of_groups(spec, lambda _, __, *own: hop(*own), values, jnp.uint32(0))


def reduce_by_group(
    spec: TrainSpec, hop: Callable[..., Sequence[Any]], *values: Mapping[Path, Any], seed: Seed
) -> dict[Path, Any]:
    """Run ``hop(reduction, seed, *values)`` for the gradients of each group, as ``by_group`` does."""

    def of_leaves(leaves: tuple[ParamLayout, ...], seed: Seed, *own: Any) -> Sequence[Any]:
        return hop(GradientReduction(spec.strategy, leaves, spec.world), seed, *own)

    return _of_groups(spec, of_leaves, values, seed)


def _of_groups(
    spec: TrainSpec,
    hop: Callable[..., Sequence[Any]],
    values: Sequence[Mapping[Path, Any]],
    seed: Seed,
) -> dict[Path, Any]:
    """Run ``hop(leaves, seed, *values)`` for each group and layer, each with a separate seed."""
    result: dict[Path, Any] = {}
    for number, group in enumerate(spec.groups):
        leaves = tuple(leaf for leaf in group.every if leaf.path in values[0])
        if not leaves:
            continue
        mine = [tuple(each[leaf.path] for leaf in leaves) for each in values]
        out = _over_layers(group, functools.partial(hop, leaves), mix(seed, number), mine)
        result |= {leaf.path: x for leaf, x in zip(leaves, out, strict=True)}
    return result


def _over_layers(
    group: ParamGroup, hop: Callable[..., Sequence[Any]], seed: Seed, values: list[Any]
) -> Sequence[Any]:
    """Run a hop for every layer; in place, if its results have the shapes of the last of its values.

    Otherwise the compiler would hold the old and the new values of all layers at once.
    """
    stack = group.stack
    if not stack:
        return hop(seed, *values)
    values = jax.tree.map(lambda x: in_a_row(x, stack), values)
    *given, last = values

    def layer(index: Array, own: Any) -> tuple[Any, ...]:
        return tuple(hop(mix(seed, index), *own))

    def in_place(replaced: Any, xs: Any) -> tuple[Any, None]:
        index, own = xs
        return put_layer(replaced, layer(index, (*own, layer_at(replaced, index))), index), None

    indices = jnp.arange(group.layers)
    first = functools.partial(jax.tree.map, lambda x: x[0])
    one = jax.eval_shape(lambda all_: (layer(indices[0], first(all_)), first(all_[-1])), values)
    result, replaced = jax.tree.map(lambda x: (x.shape, x.dtype), one)
    if result == replaced:
        results = lax.scan(in_place, last, (indices, tuple(given)))[0]
    else:
        results = lax.map(lambda xs: layer(*xs), (indices, tuple(values)))
    return jax.tree.map(lambda x: x.reshape(*stack, *x.shape[1:]), results)
