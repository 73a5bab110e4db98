"""A unit: the module whose weights are gathered just before use and dropped after.

A unit's parameters reach the model as ``Sharded`` values, which carry all that a gather needs. Calling the
unit goes through ``call_unit``: one ``custom_vjp`` that gathers the weights, runs the module, and in the
backward pass gathers again, runs the module's own vjp and reduces the gradients to their owners.

The ``ShardingStrategy`` decides where its weights come from and where its gradients go.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Num

from zerojax.comm.collectives import UnitComm, Values
from zerojax.errors import ConfigurationError
from zerojax.matmul.operand import Codes, Fp8Operand, Scaled, with_values
from zerojax.matmul.replay import at_matmuls
from zerojax.schedule.breadth_first import all_batched, map_microbatches, with_batching_rule
from zerojax.schedule.remat import rematerialised
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.strategy import ShardingStrategy
from zerojax.sharding.wire_format import Seed, mix

Body = Callable[..., Any]

TAKEN = "zerojax: a weight as its unit takes it"
"""The ``checkpoint_name`` of a ``Sharded`` weight's arrays where its unit reads them (see ``taken``)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sharded:
    """One parameter as a unit receives it: a value in the model's tree, which scans slice like any other.

    Attributes:
        source: the weight at the strategy's source level; ``Scaled``, if fp8 products read it.
        sink: zeros at the sink's level; their cotangent is the gradient.
        seed: salts stochastic rounding; one per layer, if the leaf is stacked.
        leaf: its layout.
        strategy: how it travels.
        copy: delta's secondary copy, if the unit updates it itself; call ``updated`` with the new one.
    """

    source: Num[Array, "..."] | Scaled
    sink: Num[Array, "..."]
    seed: Seed
    leaf: ParamLayout = dataclasses.field(metadata={"static": True})
    strategy: ShardingStrategy = dataclasses.field(metadata={"static": True})
    copy: Num[Array, "..."] | None = None

    def updated(self, copy: Num[Array, "..."]) -> "Sharded":
        """The weight with its secondary copy as the source from now on."""
        strategy = dataclasses.replace(self.strategy, source="secondary")
        return dataclasses.replace(self, source=with_values(self.source, copy), copy=None, strategy=strategy)

    def __jax_array__(self) -> Array:
        """Refuse use outside a unit's call, where there is no whole weight."""
        raise ConfigurationError(read_outside(self.leaf.name))

    def __repr__(self) -> str:
        """The name alone, which ``translated_errors`` looks for in messages."""
        return f"Sharded({self.leaf.name!r})"


# Flax applies the operators of a parameter to its value.
_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
_OTHERS = ["getitem", "array", "neg", "pos", "abs", "lt", "le", "gt", "ge"]
for _operator in [*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS]:
    setattr(Sharded, f"__{_operator}__", lambda self, *_: self.__jax_array__())


def read_outside(weight: str) -> str:
    """The error message for a weight that is read outside a call of its unit."""
    return (
        f"the weight {weight!r} is sharded and was read outside a call of its unit. For a norm or a penalty "
        "use zerojax.weight_sum; for its values call the unit's own methods, or leave its class out of "
        "ZeroConfig.units."
    )


FORWARD_MODE = (
    "a loss cannot take forward-mode derivatives (jax.jvp, jax.jacfwd, jax.hessian) through a unit or a "
    "Stack: take reverse-mode ones (jax.grad, jax.vjp, jax.jacrev), of each other where it needs second "
    "derivatives."
)

# Parts of JAX's messages about transformations that units do not support, and the messages to show instead.
_TRANSLATIONS = {
    "can't apply forward-mode differentiation": FORWARD_MODE,
    "does not support reverse-mode autodiff": (
        "a loss cannot take a gradient of its own through a unit or a Stack for micro-batches in breadth: "
        'set accumulate_order="depth".'
    ),
    "but got uint32": (
        "a loss took a gradient with respect to unsigned integers. With respect to the model (nnx.grad) it "
        "can take none: the weights of units are sharded there."
    ),
}


@contextlib.contextmanager
def translated_errors() -> Generator[None]:
    """Replace JAX's errors about units by messages that name the way out.

    Raises:
        ConfigurationError: for such a TypeError or ValueError.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if found := re.search(r"Sharded\('(.*?)'\)", str(error)):
            raise ConfigurationError(read_outside(found[1])) from error
        for text, message in _TRANSLATIONS.items():
            if text in str(error):
                raise ConfigurationError(message) from error
        raise


def is_gathered(weight: Any) -> bool:
    """Whether a unit's parameter has to be gathered; at stages 0 to 2 it is whole."""
    return isinstance(weight, Sharded) and weight.strategy.keep != "full"


def materialise(weights: Sequence[Sharded]) -> Values:
    """Gather weights that belong to no unit; they stay whole until the backward pass ends.

    Their gradients are reduced once, after all uses have contributed.
    """
    if not weights:
        return ()
    comm, (sources, sinks, seed), _ = take_apart(weights)
    return _to_whole(comm, comm.to_secondary(comm.strategy.source, sources), sinks, seed)


def call_unit(body: Body, weights: Sequence[Sharded], inputs: Any) -> Any:
    """Run ``body(weights, inputs)`` on gathered weights.

    Args:
        body: a pure function of whole leaves of unsharded shape and of ``inputs``; it may close over
            nothing that is traced.
        weights: the unit's parameters.
        inputs: a pytree of arrays: activations, the unit's other state.

    Returns:
        The result of ``body``. Cotangents of ``inputs`` are ordinary, those of the weights go to their
        sinks.
    """
    comm, (sources, sinks, seed), _ = take_apart(weights)
    on_whole = on_operands(body, comm.leaves)
    body = as_layer(lambda whole, inputs: on_whole(whole, *inputs), comm.strategy)
    inputs = (scales_of(weights), inputs)

    def in_breadth(size: int, mapped: Any, *args: Any) -> tuple[Any, Any]:
        """Run one micro-batch after another."""
        del size
        *weights_mapped, inputs_mapped = mapped
        refuse_mapped(weights_mapped)
        if not any(jax.tree.leaves(inputs_mapped)):
            out = call_gathered(comm, body, *args)
            return out, all_batched(out, False)
        out = call_gathered(comm, map_microbatches(body, (inputs_mapped,)), *args)
        return out, all_batched(out, True)

    run = with_batching_rule(in_breadth, functools.partial(call_gathered, comm, body))
    return run(sources, sinks, seed, inputs)


def on_operands(body: Body, leaves: Sequence[ParamLayout]) -> Body:
    """``body(weights, *args)`` as a function of what ``UnitComm.to_whole`` returns.

    Args:
        body: a pure function of whole weights; it may close over nothing that is traced.
        leaves: the unit's parameters.

    Returns:
        The same of ``(whole, scales, *args)``, with the scales that ``scales_of`` finds.
    """
    run = at_matmuls(body)

    def with_scales(whole: Sequence[Any], scales: Sequence[Array], *args: Any) -> Any:
        each = iter(scales)
        weights = [
            Fp8Operand(x.codes, x.gradient, next(each), leaf.name) if isinstance(x, Codes) else x
            for x, leaf in zip(whole, leaves, strict=True)
        ]
        return run(tuple(weights), *args)

    return with_scales


def as_layer(body: Body, strategy: ShardingStrategy) -> Body:
    """``body`` under the name that profiles show, rematerialised as the strategy says."""
    return jax.named_scope("layer")(rematerialised(body, strategy.remat))


def scales_of(weights: Sequence[Sharded]) -> list[Array]:
    """The scales of those that are operands of fp8 products."""
    return [taken(weight.source.scale) for weight in weights if isinstance(weight.source, Scaled)]


def refuse_mapped(weights: Any) -> None:
    """Refuse to map a unit over its own weights in breadth.

    Args:
        weights: whether they are mapped: a pytree of bools.

    Raises:
        ConfigurationError: one is.
    """
    if any(jax.tree.leaves(weights)):
        raise ConfigurationError(
            "a unit is mapped over its own weights (by jax.vmap in the model?), which micro-batches in "
            'breadth do not allow: set accumulate_order="depth".'
        )


def take_apart(
    weights: Sequence[Sharded],
) -> tuple[UnitComm, tuple[Values, Values, Seed], Values | None]:
    """A unit's communication; its sources, sinks and seed; its copies, or None."""
    leaves = tuple(weight.leaf for weight in weights)
    sources: tuple[Any, ...] = tuple(weight.source for weight in weights)
    sinks = tuple(weight.sink for weight in weights)
    copies = tuple(weight.copy for weight in weights if weight.copy is not None)
    return UnitComm(weights[0].strategy, leaves), (sources, sinks, weights[0].seed), copies or None


def taken[T](values: T) -> T:
    """Mark arrays of ``Sharded`` weights as read by their unit, for ``weight_reads``."""
    return checkpoint_name(values, TAKEN)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _to_whole(comm: UnitComm, secondary: Values, sinks: Values, seed: Seed) -> Values:
    """Whole parameters, whose gradients of any order go to the sinks."""
    del sinks, seed
    return comm.to_whole(secondary)


def _to_whole_fwd(comm: UnitComm, secondary: Values, sinks: Values, seed: Seed) -> tuple[Values, Seed]:
    return _to_whole(comm, secondary, sinks, seed), seed


def _delivered(comm: UnitComm, grads: Values, seed: Seed) -> Values:
    """Gradients at the sinks. They are not differentiated again: kernels that encode have no derivative.

    Nothing is lost by that: a loss with a gradient in it takes it with respect to activations, and discards
    the weights' gradients that arise on the way.
    """
    return comm.to_sink(lax.stop_gradient(grads), seed)


def _to_whole_bwd(comm: UnitComm, seed: Seed, grads: Values) -> Any:
    return None, _delivered(comm, grads, seed), None


_to_whole.defvjp(_to_whole_fwd, _to_whole_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def call_gathered(comm: UnitComm, body: Body, sources: Values, sinks: Values, seed: Seed, inputs: Any) -> Any:
    """``call_unit`` for weights that ``take_apart`` has taken apart."""
    del sinks, seed
    # Without the barrier the compiler may gather every unit's weights before the first is used.
    sources, inputs = lax.optimization_barrier((taken(sources), inputs))
    return body(comm.to_whole(comm.to_secondary(comm.strategy.source, sources)), inputs)


def _call_fwd(comm: UnitComm, body: Body, sources: Values, sinks: Values, seed: Seed, inputs: Any) -> Any:
    strategy = comm.strategy
    held, inputs = lax.optimization_barrier((taken(sources), inputs))
    started = comm.to_secondary(strategy.source, lax.stop_gradient(held))
    # A scan's own input is kept as it came, and so is not stacked a second time for the backward pass.
    kept = sources if strategy.source == strategy.keep else started
    vjp: Any
    out, vjp = jax.vjp(body, _to_whole(comm, started, sinks, seed), inputs)
    # Whole weights are not residuals: the backward pass gathers them again.
    _, *others = vjp.args_res
    return out, (kept, sinks, vjp.replace(args_res=[None, *others]), seed)


def _call_bwd(comm: UnitComm, body: Body, residuals: Any, cotangent: Any) -> Any:
    del body
    kept, sinks, vjp, seed = residuals
    kept, seed = taken((kept, seed))
    # The second gather waits for the cotangent and is not merged with the first.
    kept, vjp, cotangent = lax.optimization_barrier((kept, vjp, cotangent))
    secondary = comm.to_secondary(comm.strategy.keep, lax.stop_gradient(kept))
    # If the loss has a gradient of its own in it, this gather has a gradient, too.
    whole = _to_whole(comm, secondary, sinks, mix(seed, 1))
    grads, inputs = vjp.replace(args_res=[whole, *vjp.args_res[1:]])(cotangent)
    return None, _delivered(comm, grads, seed), None, inputs


call_gathered.defvjp(_call_fwd, _call_bwd)
