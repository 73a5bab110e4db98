"""Norms and penalties of the weights, computed on the shards of the master weights.

A loss function cannot read a unit's weights through the model, since they are gathered only for the unit's
call. It can take a sum over their elements: every device sums over the fp32 master weights that it owns, and
one scalar crosses the mesh. In the backward pass each element's owner computes its gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from zerojax.adapters.loss import CONTEXT, LossContext
from zerojax.adapters.nnx_units import leaves_of
from zerojax.errors import ConfigurationError
from zerojax.schedule.layer_update import LayerState
from zerojax.schedule.unit import is_sharded
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import NODE
from zerojax.sharding.param_tree import Path
from zerojax.sharding.strategy import Level
from zerojax.validation.patterns import why_not

Elementwise = Callable[[Float[Array, "..."]], Float[Array, "..."]]


def weight_sum(
    model: object, function: Elementwise = jnp.square, *, paths: str | Sequence[str] = "*"
) -> Float[Array, ""]:
    """Sum a function of every element of a model's parameters, within a loss function.

    With ``jnp.square`` it is an L2 penalty, with ``jnp.abs`` an L1 penalty; ``jnp.sqrt(weight_sum(model))``
    is the norm. It is differentiable with respect to the weights. On a mesh it is computed on the shards of
    the fp32 master weights, whatever the compute dtype: no weight is gathered, and one scalar is reduced.
    Frozen weights have no master, so they are skipped.

    Args:
        model: the argument of the loss function; or an ordinary ``nnx.Module``, such as
            ``zerojax.gather_model`` returns.
        function: elementwise, from fp32 to fp32 arrays of the same shape. It must not close over traced
            values.
        paths: shell patterns of the included parameters' paths, such as ``"*kernel"``, like
            ``ZeroConfig.frozen``: case does not matter, and a pattern that begins with "!" excludes.

    Returns:
        An fp32 scalar, the same on all devices.

    Raises:
        ConfigurationError: ``model`` is neither, or no parameter matches.

    Examples:
        >>> def penalised(model, batch):
        ...     return loss_fn(model, batch) + 1e-4 * zerojax.weight_sum(model, paths="*kernel")
        >>> metrics = zerojax.eval_step(state, batch, penalised)
    """
    patterns = [paths] if isinstance(paths, str) else paths
    context = CONTEXT.get()
    if model is not None and context.model is model:
        sums = {path: lambda path=path: _sum_of_shards(path, context, function) for path in context.masters}
    else:
        sums = {
            path: lambda x=x: jnp.sum(function(x.astype(jnp.float32))) for path, x in _whole_weights(model)
        }
    chosen = [add for path, add in sums.items() if why_not(patterns, "/".join(path), "paths") is None]
    if sums and not chosen:
        raise ConfigurationError(
            f"weight_sum: no parameter matches {', '.join(patterns)}; there is {_some(sums)}."
        )
    return jnp.asarray(sum(add() for add in chosen), jnp.float32)


def _some(paths: Iterable[Path]) -> str:
    names = ["/".join(path) for path in paths]
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def _whole_weights(model: object) -> Iterator[tuple[Path, Array]]:
    """The floating-point parameters of an ordinary module."""
    if not isinstance(model, nnx.Module):
        raise ConfigurationError(
            f"weight_sum was given a {type(model).__name__}: pass the model that the loss function was "
            "given, or an nnx.Module."
        )
    for path, value in leaves_of(nnx.state(model, nnx.Param)):
        if is_sharded(value):
            raise ConfigurationError(
                "weight_sum was given a part or a copy of the model whose weights are sharded: pass the "
                "model that the loss function was given, and choose by paths=."
            )
        if jnp.issubdtype(value.dtype, jnp.floating):
            yield path, value


def _sum_of_shards(path: Path, context: LossContext, function: Elementwise) -> Float[Array, ""]:
    master, sink, level = context.masters[path], context.sinks[path], context.level
    leaf = master.layout
    if isinstance(sink, LayerState):
        raise ConfigurationError(
            f"weight_sum reads {leaf.name!r}, whose stack is updated in its backward pass, without the sum's "
            "gradient: leave it out by paths=, or set update_in_backward=False."
        )
    at_sink = sink.shape[-1:]

    def own_part(shard: Float[Array, "... owned"]) -> Float[Array, ""]:
        # Without the padding, where `function` may not be zero.
        first = lax.axis_index(leaf.owners) * leaf.owned
        inside = leaf.element_at(first + jnp.arange(leaf.owned)) < leaf.size
        return jnp.sum(jnp.where(inside, function(shard), 0))

    # The gradient goes to the sink, as units' gradients do: master weights are not differentiated.
    @jax.custom_vjp
    def total(shard: Float[Array, "... owned"], sink: Array) -> Float[Array, ""]:
        del sink
        return lax.psum(own_part(shard), leaf.owners)

    def forward(shard: Float[Array, "... owned"], sink: Array) -> tuple[Float[Array, ""], Array]:
        return total(shard, sink), shard

    def backward(shard: Float[Array, "... owned"], cotangent: Float[Array, ""]) -> tuple[None, Array]:
        # The sum is part of every device's loss, and the devices' gradients are added up.
        (grad,) = jax.vjp(own_part, shard)[1](lax.psum(cotangent, leaf.world.axes))
        if level == "primary" and grad.shape[-1:] == at_sink:
            return None, grad
        if leaf.in_every_node:
            first = lax.axis_index(NODE) * leaf.shard
            grad = lax.dynamic_slice_in_dim(grad, first, leaf.shard, axis=-1)
        return None, _at_sink(grad, leaf, level)

    total.defvjp(forward, backward)
    return total(master.values, sink)


def _at_sink(grad: Float[Array, "... shard"], leaf: ParamLayout, level: Level) -> Array:
    """The owner's gradient among zeros at the sink's level: this device's part of the hops' sum."""
    if level == "primary":
        return grad
    own = leaf.on_device
    in_node = level == "secondary" or leaf.parts > 1
    axes, size = ((NODE,), leaf.secondary) if in_node else (leaf.world.owners, leaf.padded)
    zeros = jnp.zeros((*grad.shape[:-1], size), grad.dtype)
    index = lax.axis_index(axes) if size > leaf.shard else 0
    placed = lax.dynamic_update_slice_in_dim(zeros, grad, index * leaf.shard, axis=-1)
    if level == "secondary":
        return placed
    return placed[..., : own.size].reshape(own.unsharded_shape)
