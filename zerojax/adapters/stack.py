"""A stack of equal blocks as one scanned module: compile time does not grow with depth."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from flax import nnx
from jaxtyping import Array, PyTree

from zerojax.adapters.nnx_call import STATE, call_with_weights, changed_state, modules_in
from zerojax.errors import ConfigurationError
from zerojax.matmul.replay import Operand, at_matmuls
from zerojax.schedule.partition import split_arrays
from zerojax.schedule.prefetch_scan import scan_units
from zerojax.schedule.sharded import Sharded, is_gathered
from zerojax.schedule.unit import Arrays


class Stack(nnx.Module):
    """``layers`` blocks in a row, their parameters stacked along a leading axis.

    ``stack(x, *args)`` is ``for block in blocks: x = block(x, *args)``, run by ``lax.scan``;
    ``stack(x, by_layer={"scale": scales})`` calls block i with ``scale=scales[i]``, and
    ``stack(x, method="decode")`` calls ``block.decode(x)``. In a ``TrainState`` each layer is a unit whose
    weights are gathered for it alone, whether or not the block's class is in ``ZeroConfig.units``.

    Examples:
        >>> class Block(nnx.Module):
        ...     def __init__(self, *, rngs):
        ...         self.up = nnx.Linear(8, 8, rngs=rngs)
        ...
        ...     def __call__(self, x):
        ...         return x + nnx.relu(self.up(x))
        >>> stack = zerojax.Stack(Block, 3, rngs=nnx.Rngs(0))
        >>> stack(jnp.ones((2, 8))).shape
        (2, 8)
    """

    def __init__(self, block: Callable[..., nnx.Module], layers: int, *, rngs: nnx.Rngs):
        """Create the blocks, each with its own random bits.

        Args:
            block: called as ``block(rngs=rngs)``: a module class or a factory.
            layers: the number of blocks.
            rngs: seeds them.

        Raises:
            ConfigurationError: ``layers`` is less than 1, or ``block`` is or returns a module that exists
                already.
        """
        if layers < 1:
            raise ConfigurationError(f"Stack: layers={layers} must be at least 1.")
        if isinstance(block, nnx.Module):
            raise ConfigurationError(
                f"Stack: block is a {type(block).__name__} that exists already: give its class, or a "
                "function that makes one from rngs."
            )
        self.layers = layers

        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> nnx.Module:
            return block(rngs=rngs)

        # Blocks may keep these rngs; nnx.split_rngs would merge the kept ones into one again.
        try:
            self.block = make(rngs.split(layers))
        except ValueError as error:
            if "different trace level" not in str(error):
                raise
            raise ConfigurationError(
                "Stack: block(rngs=rngs) returned a module, or a part of one, that was created before. It is "
                "called once for all layers, and has to create what it returns, from these rngs."
            ) from error

    def __call__(
        self,
        x: PyTree[Array],
        *args: PyTree,
        by_layer: dict[str, Array] | None = None,
        method: str = "__call__",
        **kwargs: PyTree,
    ) -> PyTree[Array]:
        """Apply the blocks in order.

        Args:
            x: the input of the first block: an array, or a pytree of floating-point arrays; each block must
                keep its shapes and dtypes.
            *args: passed to every block.
            by_layer: arguments that differ, by name: arrays with a leading axis of layers. Each block gets
                its own part.
            method: the name of the blocks' method to call.
            **kwargs: passed to every block.

        Returns:
            The output of the last block.

        Raises:
            ConfigurationError: an argument is a module with state, which the blocks could not change.
        """
        for module in modules_in((args, kwargs)):
            if names := [path for path, _ in nnx.to_flat_state(nnx.state(module, STATE))]:
                raise ConfigurationError(
                    f"a Stack was given a {type(module).__name__}, whose state "
                    f"{'/'.join(map(str, names[0]))!r} its blocks share and cannot change: make it a part of "
                    "the block, or call it outside the Stack."
                )
        graph, params, state = nnx.split(self.block, nnx.Param, ...)
        weights, structure = jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Sharded | Operand))
        arrays, join = split_arrays((args, kwargs))

        def body(whole: Sequence[Array], x: Arrays, own: Arrays, arrays: Arrays) -> tuple[Arrays, Arrays]:
            state, differing = own
            args, kwargs = join(arrays)

            def use(block: nnx.Module) -> tuple[Arrays, Arrays]:
                out = getattr(block, method)(x, *args, **kwargs | differing)
                return out, changed_state(block)

            return call_with_weights(graph, jax.tree.unflatten(structure, whole), state, use)

        own = (state, by_layer or {})
        if weights and all(is_gathered(weight) for weight in weights):
            x, state, copies, probe = scan_units(body, weights, x, own, arrays)
            if copies or probe:
                # Like state: the next call begins with them, and the step finds them in the model.
                weights = [weight.updated(copies) for weight in weights]
                if probe:
                    weights[0] = dataclasses.replace(weights[0], probe=probe[0])
                nnx.update(self.block, jax.tree.unflatten(structure, weights))
        else:
            run = at_matmuls(body)
            x, state = jax.lax.scan(lambda x, layer: run(layer[0], x, layer[1], arrays), x, (weights, own))
        nnx.update(self.block, state)
        return x
