"""Sums over all devices' tokens inside a loss function, which runs on one device's rows of the batch."""

import functools
from contextlib import AbstractContextManager
from contextvars import ContextVar

import jax
from jax import lax
from jaxtyping import Array, PyTree

from zerojax.schedule.context import holding

_axes: ContextVar[tuple[str, ...]] = ContextVar("mesh axes of the loss", default=())


def over_world(axes: tuple[str, ...]) -> AbstractContextManager[None]:
    """Within this context ``world_sum`` sums over these mesh axes."""
    return holding(_axes, axes)


def world_sum[T: PyTree[Array]](x: T) -> T:
    """Sum arrays over all devices that share a step, in a loss function; elsewhere they stay as they are.

    For losses that are no mean over tokens, such as the balance of experts. Every device then has the same
    sum and must compute the same from it. Gradients are those of the loss of the whole batch: what all
    devices' losses say about the sum flows back to each device's part of it. One small collective in the
    forward and one in the backward pass cross the mesh; with local updates they stay within the node, and
    with micro-batches the sum is over the devices' rows of one of them.

    Args:
        x: a pytree of floating-point arrays, of any shapes, the same on all devices.

    Returns:
        The sums, in the same dtypes.

    Examples:
        >>> def loss(model, batch):
        ...     rows = zerojax.world_sum(jnp.float32(batch["x"].shape[0]))
        ...     mean = zerojax.world_sum(jnp.sum(model(batch["x"]))) / rows
        ...     return jnp.square(mean)  # of the whole batch's mean
    """
    axes = _axes.get()
    return _sum(axes, x) if axes else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum[T: PyTree[Array]](axes: tuple[str, ...], x: T) -> T:
    return lax.psum(x, axes)


# The sum is part of every device's loss, and the devices' gradients are added up.
_sum.defvjp(lambda axes, x: (_sum(axes, x), None), lambda axes, _, cotangent: (lax.psum(cotangent, axes),))
