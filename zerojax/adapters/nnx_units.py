"""Units of NNX models: modules that gather when they are called, and stacks of equal blocks.

A unit's instances get a subclass of their own class. Its methods gather the weights, restore the class, and
run the original method on a copy that has whole weights. This class is set on the abstract copy that zerojax
keeps, never on the user's class or objects, so any number of models live side by side.

A ``Stack`` runs its blocks as one scan, so that compile time does not grow with depth. Each of its layers is
a unit. Both call a module as a pure function of its weights and state (``call_with_weights``).
"""

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.transforms.compilation import JitWrapped
from flax.typing import PathParts
from jax.tree_util import KeyPath
from jaxtyping import Array, Num, PyTree

from zerojax.dataflow import changed
from zerojax.errors import ConfigurationError
from zerojax.matmul.replay import Operand, at_matmuls
from zerojax.schedule.prefetch_scan import Scanned, scan_units
from zerojax.schedule.transforms import split_arrays
from zerojax.schedule.unit import Arrays, Sharded, call_unit, is_sharded
from zerojax.schedule.user_code import assigned
from zerojax.sharding.layers import Order, Place, layer_at
from zerojax.sharding.param_tree import Path

STATE = nnx.Not(nnx.Any(nnx.Param, nnx.Intermediate))
"""Filter for the state that a module keeps between calls, besides its parameters."""
_NORMALISING = (nnx.SpectralNorm, nnx.WeightNorm)
"""Layers that assign to another layer's weights for the time of a call."""
Block = Callable[..., nnx.Module]
"""A module class or a factory, called as ``block(rngs=rngs)``."""


class Stack(nnx.Module):
    """``layers`` blocks in a row, their parameters stacked along a leading axis.

    ``stack(x, *args)`` is ``for block in blocks: x = block(x, *args)``, run by ``lax.scan``;
    ``stack(x, by_layer={"scale": scales})`` calls block i with ``scale=scales[i]``, and
    ``stack(x, method="decode")`` calls ``block.decode(x)``. In a ``TrainState`` each layer is a unit whose
    weights are gathered for it alone, whether or not the block's class is in ``ZeroConfig.units``.

    The blocks may be of several kinds: ``Stack([Local, Local, Full], 24, rngs=rngs)`` repeats this period
    eight times. A list of 24 blocks gives each layer its own. Blocks are of one kind if they are equal
    (``functools.partial`` objects are not: repeat the same one). The blocks of a kind are stacked together.

    Attributes:
        layers: the number of blocks.
        order: the kind of each layer.
        parts: the layers that run together; all, unless ``parts`` was given.
        block: the blocks of a stack of one kind. With several kinds, ``getattr(stack, "3").block`` are the
            blocks of the kind whose first layer is 3.

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

    def __init__(
        self,
        block: Block | Sequence[Block],
        layers: int,
        *,
        rngs: nnx.Rngs,
        parts: Sequence[int] | None = None,
    ):
        """Create the blocks, each with its own random bits.

        Args:
            block: a module class or a factory; or a list of some, which repeats until there are enough.
            layers: the number of blocks.
            rngs: seeds them.
            parts: the numbers of layers that run together, if not all do: ``[6, 2]`` runs the first six, then
                the others. Layers of one kind are in one part. Prefetching starts again with each part.

        Raises:
            ConfigurationError: ``layers`` is less than 1, or less than there are blocks; ``block`` is or
                returns a module that exists already; or ``parts`` divides the layers of a kind.
        """
        blocks = list(block) if isinstance(block, Sequence) else [block]
        if layers < 1:
            raise ConfigurationError(f"Stack: layers={layers} must be at least 1.")
        if not 0 < len(blocks) <= layers:
            raise ConfigurationError(
                f"Stack: a list of {len(blocks)} blocks for {layers} layers: give at least one block, and at "
                "most one for each layer."
            )
        for each in blocks:
            if isinstance(each, nnx.Module):
                raise ConfigurationError(
                    f"Stack: block is a {type(each).__name__} that exists already: give its class, or a "
                    "function that makes one from rngs."
                )
        self.layers = layers
        different = [each for number, each in enumerate(blocks) if each not in blocks[:number]]
        self.order = tuple(different.index(blocks[number % len(blocks)]) for number in range(layers))
        self.parts = _parts(self.order, [layers] if parts is None else parts)
        counts = [self.order.count(kind) for kind in range(len(different))]
        if len(different) == 1:
            self.block = _stacked(different[0], layers, rngs)
        else:
            made = [_stacked(each, count, rngs) for each, count in zip(different, counts, strict=True)]
            for kind, each in enumerate(made):
                setattr(self, str(self.order.index(kind)), nnx.Dict(block=each))

    @property
    def stacked(self) -> dict[tuple[str, ...], nnx.Module]:
        """The blocks of each kind, by their paths in the stack."""
        if len(set(self.order)) == 1:
            return {("block",): self.block}
        first = [str(self.order.index(kind)) for kind in range(max(self.order) + 1)]
        return {(name, "block"): getattr(self, name).block for name in first}

    def __call__(
        self,
        x: PyTree[Array],
        *args: PyTree,
        by_layer: dict[str, Array] | None = None,
        by_kind: dict[str, Sequence[PyTree]] | None = None,
        part: int | None = None,
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
            by_kind: arguments that differ between kinds, by name: a value for each kind, in the order of
                their first layers.
            part: the index of the part to run. Results of a part can so become arguments of a later one. None
                runs all parts.
            method: the name of the blocks' method to call.
            **kwargs: passed to every block.

        Returns:
            The output of the last block.

        Raises:
            ConfigurationError: an argument is a module with state, which the blocks could not change.
        """
        for module in modules_in((args, kwargs, by_kind)):
            if names := [path for path, _ in nnx.to_flat_state(nnx.state(module, STATE))]:
                raise ConfigurationError(
                    f"a Stack was given a {type(module).__name__}, whose state "
                    f"{'/'.join(map(str, names[0]))!r} its blocks share and cannot change: make it a part of "
                    "the block, or call it outside the Stack."
                )
        arrays, join = split_arrays((args, kwargs, by_kind or {}))
        blocks = list(self.stacked.values())
        for layers in self.parts if part is None else [self.parts[part]]:
            own = sorted({*self.order[layers.start : layers.stop]})
            kinds = [_scanned(blocks[kind], method, join, kind, self.order, by_layer or {}) for kind in own]
            order = Order(tuple(own.index(self.order[number]) for number in layers))
            x = _run(order, [blocks[kind] for kind in own], kinds, x, arrays)
        return x


def _run(
    order: Order, blocks: Sequence[nnx.Module], kinds: Sequence[Scanned], x: Arrays, arrays: Arrays
) -> Arrays:
    """Run layers in their order, and update the state of ``blocks``, one for each kind."""
    weights = [weight for kind in kinds for weight in kind.weights]
    # At stages 0 to 2 weights are whole already.
    if weights and all(is_sharded(weight) and weight.weight.level != "full" for weight in weights):
        x, after = scan_units(order, kinds, x, arrays)
    else:
        x, states = _run_whole(order, kinds, x, arrays)
        after = [(None, state) for state in states]
    for block, (weights, state) in zip(blocks, after, strict=True):
        if weights is not None:
            # Like state: the next call begins with them, and the step finds them in the model.
            nnx.update(block, jax.tree.unflatten(_leaves(nnx.state(block, nnx.Param))[1], weights))
        nnx.update(block, state)
    return x


def _parts(order: tuple[int, ...], counts: Sequence[int]) -> tuple[range, ...]:
    """The layers of each part."""
    ends = itertools.accumulate(counts)
    parts = tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
    kinds = [{*order[part.start : part.stop]} for part in parts]
    if min(counts, default=0) < 1 or sum(counts) != len(order) or sum(map(len, kinds)) > len({*order}):
        raise ConfigurationError(
            f"Stack: parts={list(counts)} of layers of the kinds {order}: give numbers of layers whose sum "
            f"is {len(order)}, and all layers of a kind in one part. To split a kind, make two Stacks."
        )
    return parts


def _stacked(block: Block, layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """Blocks of one kind."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> nnx.Module:
        return block(rngs=rngs)

    # Blocks may keep these rngs; nnx.split_rngs would merge the kept ones into one again.
    try:
        return make(rngs.split(layers))
    except ValueError as error:
        if "different trace level" not in str(error):
            raise
        raise ConfigurationError(
            "Stack: block(rngs=rngs) returned a module, or a part of one, that was created before. It is "
            "called once for all layers, and has to create what it returns, from these rngs."
        ) from error


def _leaves(params: nnx.State) -> tuple[list[Any], Any]:
    """The parameters of stacked blocks as values that a scan slices, and their structure."""
    return jax.tree.flatten(params, is_leaf=lambda x: isinstance(x, Sharded | Operand))


def _scanned(
    block: nnx.Module,
    method: str,
    join: Callable[[Sequence[Array]], tuple[tuple[PyTree, ...], dict[str, PyTree], dict[str, Any]]],
    kind: int,
    order: tuple[int, ...],
    by_layer: dict[str, Array],
) -> Scanned:
    """The blocks of one kind. Their method gets the joined arguments, the kind's, and each layer's."""
    graph, params, state = nnx.split(block, nnx.Param, ...)
    weights, structure = _leaves(params)

    def body(whole: Sequence[Array], own: Arrays, x: Arrays, arrays: Arrays) -> tuple[Arrays, Arrays]:
        state, differing = own
        args, kwargs, by_kind = join(arrays)
        differing = differing | {name: values[kind] for name, values in by_kind.items()}

        def use(block: nnx.Module) -> tuple[Arrays, Arrays]:
            out = getattr(block, method)(x, *args, **kwargs | differing)
            return out, changed_state(block)

        return call_with_weights(graph, jax.tree.unflatten(structure, whole), state, use)

    if len(set(order)) > 1:
        numbers = jnp.array([number for number, own in enumerate(order) if own == kind])
        by_layer = {name: values[numbers] for name, values in by_layer.items()}
    return Scanned(body, weights, (state, by_layer))


def _run_whole(
    order: Order, kinds: Sequence[Scanned], x: Arrays, arrays: Arrays
) -> tuple[Arrays, list[Arrays]]:
    """Run blocks whose weights are not gathered; returns the output, and the new state of each kind."""
    runs = [at_matmuls(kind.body) for kind in kinds]
    stacks: tuple[Arrays, ...] = tuple((kind.weights, kind.state) for kind in kinds)
    if order.uniform:
        x, state = jax.lax.scan(lambda x, layer: runs[0](layer[0], layer[1], x, arrays), x, stacks[0])
        return x, [state]
    begin, period = order.first_periodic, order.period
    turns = (order.last + 1 - begin) // period
    states: list[list[Arrays]] = [[] for _ in kinds]

    def alone(x: Arrays, numbers: Iterable[int]) -> Arrays:
        for number in numbers:
            place = Place(order, number)
            weights, own = place.of(stacks)
            x, state = runs[place.kind](weights, own, x, arrays)
            states[place.kind].append(jax.tree.map(lambda x: x[None], state))
        return x

    def take_turn(x: Arrays, stacks: tuple[Arrays, ...]) -> tuple[Arrays, list[Arrays]]:
        new: list[list[Arrays]] = [[] for _ in kinds]
        for kind in order.kinds[begin : begin + period]:
            weights, own = layer_at(stacks[kind], len(new[kind]))
            x, state = runs[kind](weights, own, x, arrays)
            new[kind].append(state)
        return x, [jax.tree.map(lambda *each: jnp.stack(each), *own) if own else None for own in new]

    x = alone(x, range(begin))
    by_turn = tuple(_by_turn(order, kind, turns, stack) for kind, stack in enumerate(stacks))
    x, repeated = jax.lax.scan(take_turn, x, by_turn)
    for own, new in zip(states, repeated, strict=True):
        own.extend([] if new is None else [jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), new)])
    x = alone(x, range(begin + turns * period, order.last + 1))
    return x, [jax.tree.map(lambda *each: jnp.concatenate(each), *own) for own in states]


def _by_turn(order: Order, kind: int, turns: int, stack: Arrays) -> Arrays:
    """The layers of a kind in the repeated part of the stack, ``[turns, ...]``; None if there are none."""
    begin, end = order.first_periodic, order.first_periodic + turns * order.period
    first, count = order.kinds[:begin].count(kind), order.kinds[begin:end].count(kind)
    if not count:
        return None
    return jax.tree.map(lambda x: x[first : first + count].reshape(turns, -1, *x.shape[1:]), stack)


@functools.cache
def gathering_class(cls: type[nnx.Module]) -> type[nnx.Module]:
    """A subclass whose methods gather the weights when they are called from outside."""
    names: dict[str, object] = {"__module__": cls.__module__}
    for base in reversed(cls.__mro__[: cls.__mro__.index(nnx.Module)]):
        for name, member in vars(base).items():
            # A method that overrides Flax's, such as ToNNX's ``_setattr``, does not compute with weights.
            own = name == "__call__" or not (name.startswith("__") or hasattr(nnx.Module, name))
            if own and (inspect.isfunction(member) or isinstance(member, JitWrapped)):
                names[name] = _gathering(cls, getattr(cls, name))
    return types.new_class(cls.__name__, (cls,), exec_body=lambda namespace: namespace.update(names))


def _gathering(cls: type[nnx.Module], original: Callable[..., Arrays]) -> Callable[..., Arrays]:
    @functools.wraps(original)
    def method(self: nnx.Module, *args: object, **kwargs: object) -> Arrays:
        # The original finds its own methods as they are.
        gathering = type(self)
        self.__class__ = cls
        try:
            return _call_unit(self, original, args, kwargs)
        finally:
            self.__class__ = gathering

    return method


def _call_unit(
    module: nnx.Module, method: Callable[..., Arrays], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Arrays:
    """Run a unit's method on a copy that has whole weights, and copy its state back."""
    graph, params, state = nnx.split(module, nnx.Param, ...)
    sharded = list(filter(is_sharded, jax.tree.leaves(params, is_leaf=is_sharded)))
    if not sharded:
        return method(module, *args, **kwargs)
    if any(jnp.ndim(weight.seed) for weight in sharded):
        raise ConfigurationError(
            f"the unit {type(module).__name__} was created by nnx.vmap, as a stack of "
            f"{sharded[0].weight.layout.layers}, and is called as one: run it by nnx.scan or nnx.vmap, or "
            "leave its class out of ZeroConfig.units."
        )

    def run(
        params: nnx.State, state: nnx.State, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Arrays, list[nnx.State]]:
        def use(unit: nnx.Module) -> tuple[Arrays, list[nnx.State]]:
            out = method(unit, *args, **kwargs)
            return out, [changed_state(one) for one in (unit, *modules_in((args, kwargs)))]

        return call_with_weights(graph, params, state, use)

    out, states = call_unit(run, params, state, args, kwargs)
    for one, after in zip((module, *modules_in((args, kwargs))), states, strict=True):
        nnx.update(one, after)
    return out


def call_with_weights[T](
    graph: nnx.GraphDef, params: nnx.State, state: nnx.State, use: Callable[[nnx.Module], T]
) -> T:
    """Call ``use`` with a temporary copy of a unit that has whole weights.

    Refuse assignments to its weights.
    """
    before = jax.tree.map(lambda x: x, params)  # the copy shares its variables with ``params``
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
        # Flax's transformations return every weight as another array, so only the program shows assignments.
        jaxpr = jax.make_jaxpr(left)(before).jaxpr
        if paths := changed(jaxpr, list(given), list(replaced)):
            raise ConfigurationError(assigned("/".join(paths[0]), f"the unit {type(unit).__name__}"))
    return result


def replaced_weights(module: nnx.Module, given: Mapping[Path, object]) -> dict[Path, Num[Array, "..."]]:
    """The weights of a module, by path, that other arrays, even of equal values, replaced since ``given``.

    Weights that Flax's own layers replace in every call are skipped.
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


def leaves_of(state: nnx.State) -> Iterator[tuple[Path, Array]]:
    """The leaves of a state by path: of its variables, without their hooks, and of plain attributes."""
    for path, held in nnx.to_flat_state(state):
        yield from leaves_within(path, held)


def leaves_within(path: PathParts, held: object) -> Iterator[tuple[Path, Array]]:
    """The leaves of a variable or an attribute at a path, by path; one that holds a pytree has several."""
    value = held.get_raw_value() if isinstance(held, nnx.Variable) else held
    for inner, leaf in jax.tree_util.tree_leaves_with_path(value, is_leaf=is_sharded):
        yield leaf_path(path, inner), leaf


def leaf_path(path: PathParts, inner: KeyPath) -> Path:
    """The path of a leaf within the value at a path."""
    return (*map(str, path), *(jax.tree_util.keystr((key,), simple=True) for key in inner))


def modules_in(arguments: PyTree) -> list[nnx.Module]:
    """The modules in a call's arguments, which may be pytrees."""
    leaves = jax.tree.leaves(arguments, is_leaf=lambda leaf: isinstance(leaf, nnx.Module))
    return [leaf for leaf in leaves if isinstance(leaf, nnx.Module)]


def changed_state(module: nnx.Module) -> nnx.State:
    """All state of a module that a call may have changed, sown values included.

    Raises:
        ConfigurationError: the call assigned an array to a plain attribute, which would be lost.
    """
    state = nnx.state(module, nnx.Not(nnx.Param))
    known = {id(leaf) for leaf in jax.tree.leaves(state)}
    for path, inner in nnx.iter_modules(module):
        for name, value in vars(inner).items():
            if isinstance(value, jax.Array) and id(value) not in known:
                raise ConfigurationError(
                    f"the unit {type(module).__name__} assigned an array to its attribute "
                    f"{'/'.join(map(str, (*path, name)))!r}, which a unit cannot keep: make it an "
                    "nnx.Variable, or return it."
                )
    return state
