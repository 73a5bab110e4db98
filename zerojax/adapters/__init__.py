"""Adapters for Flax models, NNX and Linen: their parameters, their units, and running them on a mesh."""

from collections.abc import Callable

from flax import linen, nnx
from jaxtyping import Array, PyTree

from zerojax.adapters.adapter import Adapter
from zerojax.adapters.adapter import ModelState as ModelState
from zerojax.adapters.linen_adapter import LinenAdapter
from zerojax.adapters.loss import LossFn
from zerojax.adapters.nnx_adapter import NNXAdapter
from zerojax.errors import ConfigurationError
from zerojax.sharding.mesh import MeshShape

Model = Callable[[nnx.Rngs], nnx.Module] | linen.Module


def adapt(
    model: Model,
    units: tuple[type, ...],
    loss_fn: LossFn,
    sample_batch: PyTree[Array],
    world: MeshShape,
) -> Adapter:
    """The adapter for a model.

    Linen infers the shapes of parameters from ``sample_batch``.
    """
    if isinstance(model, linen.Module):
        if sample_batch is None:
            raise ConfigurationError(
                "a Linen module has no parameters before it is called: pass sample_batch=."
            )
        return LinenAdapter(model, units, loss_fn, sample_batch, world)
    if isinstance(model, nnx.Module) or not callable(model):
        raise ConfigurationError(
            f"model is a {type(model).__name__}: pass a callable that takes nnx.Rngs and returns the "
            "nnx.Module (so that its parameters are created sharded), or a Linen module."
        )
    if sample_batch is not None:
        raise ConfigurationError("sample_batch is for Linen modules: an NNX model knows its shapes.")
    return NNXAdapter(model, units)
