"""Checks that an optimizer is correct on shards.

An optimizer sees the model's own tree as global arrays, each leaf flat and padded but of its unsharded rank
(``ParamLayout.stored_shape``). Norms over a leaf or over the whole tree are therefore correct, and padding
stays zero. An optimizer that chooses leaves by their ndim gets the layers of a stack in a row, as leaves of
one layer's ndim. An optimizer that uses a leaf's shape (Adafactor's factors, Muon's matrices) is not correct.
The check proves that an update is element by element (``zerojax.optim.elementwise``). Where it can't, it
compares updates of unsharded and of flat leaves on a small copy of the tree.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from zerojax.errors import ConfigurationError, error_line
from zerojax.optim.elementwise import ELEMENTWISE, updates_element_by_element
from zerojax.optim.ema import AverageState
from zerojax.optim.moments import Shape, with_layers_in_a_row
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.zero_config import ZeroConfig

# Adafactor factors a matrix from 128 rows on: a smaller probe would not see it.
_PROBE_SIDE = 128
_PADDING = 3
_MAX_UPDATES = 64
_MOVES = frozenset(("broadcast_in_dim", "reshape", "squeeze"))
"""Operations that a scalar, which is stored as a vector, may need more or fewer of."""
_ByPath = Mapping[Path, np.ndarray]
_Shapes = tuple[tuple[Path, Shape], ...]
_Operation = tuple[str, list[int | str]]
"""Its name and parameters, and its operands: numbers of earlier results, or constants."""
_WAY_OUT = (
    "Use a transform that works element by element, or by norms of whole leaves; for Muon, "
    "zerojax.scale_by_muon."
)
_TRACED_BY = ("enable_x64", "numpy_dtype_promotion", "numpy_rank_promotion", "default_matmul_precision")
"""The options of JAX's config that change how an optimizer is traced."""


def _cached[*Args, T](function: Callable[[*Args], T]) -> Callable[[*Args], T]:
    """``functools.lru_cache`` that also looks at JAX's config."""

    @functools.lru_cache(maxsize=32)
    def under(_: Sequence[object], *args: *Args) -> T:
        return function(*args)

    @functools.wraps(function)
    def run(*args: *Args) -> T:
        return under(tuple(getattr(jax.config, f"jax_{name}") for name in _TRACED_BY), *args)

    return run


Whole = Callable[[ParamLayout], bool]
"""Whether an optimizer needs a parameter whole."""


@dataclass(frozen=True)
class OnLayout:
    """An optimizer that depends on the layout: its transform is built for each mesh and model.

    Nothing checks it: its author must make sure that it is correct on shards.

    Attributes:
        make: builds the transform of stored leaves for a mesh, layouts and options.
        whole: tells for a parameter whether it is needed whole; None if none is. With
            ``ZeroConfig.matrix_spread="node"`` every node holds such parameters, spread over its devices.
    """

    make: Callable[[Mesh, Sequence[ParamLayout], ZeroConfig], optax.GradientTransformation]
    whole: Whole | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse ``init`` and ``update``, which optax's combinators call. ``zerojax.chain`` combines them."""
        if name in ("init", "update"):
            raise ConfigurationError(
                "a transform that is built for a mesh, as zerojax.scale_by_muon, can't be a part of optax's "
                "chain, masked, partition or MultiSteps: combine it with others by zerojax.chain. It chooses "
                "its weights itself (is_matrix=), and ZeroConfig(accumulate=) sums gradients before it."
            )
        raise AttributeError(name)


Optimizer = optax.GradientTransformation | OnLayout


def chain(*parts: Optimizer) -> Optimizer:
    """``optax.chain`` for transforms and ``OnLayout`` optimizers.

    Examples:
        >>> tx = zerojax.chain(optax.clip_by_global_norm(1.0), zerojax.scale_by_muon(), optax.scale(-1e-3))
    """
    plain = [part for part in parts if not isinstance(part, OnLayout)]
    if len(plain) == len(parts):
        return optax.chain(*plain)

    def make(mesh: Mesh, leaves: Sequence[ParamLayout], zero: ZeroConfig) -> optax.GradientTransformation:
        return optax.chain(*(on_shards(part, mesh, leaves, zero) for part in parts))

    whole = [part.whole for part in parts if isinstance(part, OnLayout) and part.whole]
    return OnLayout(make, (lambda leaf: any(needed(leaf) for needed in whole)) if whole else None)


def on_shards(
    tx: Optimizer, mesh: Mesh, leaves: Sequence[ParamLayout], zero: ZeroConfig
) -> optax.GradientTransformation:
    """The transform that a step runs on stored leaves."""
    if isinstance(tx, OnLayout):
        return tx.make(mesh, leaves, zero)
    if not hasattr(tx, "update"):
        raise ConfigurationError(
            f"the optimizer is {tx!r}, not an optax transform such as optax.adamw(1e-3)."
        )
    layers = [dataclasses.replace(leaf, stack=()) for leaf in leaves]
    if layers == list(leaves) or _operations(tx, _whole(layers)) == _operations(tx, _stored(leaves)):
        check_shardable(tx, leaves)
        return tx
    check_shardable(tx, layers)
    return with_layers_in_a_row(tx, leaves, sharded=zero.stage > 0)


def _whole(leaves: Sequence[ParamLayout]) -> _Shapes:
    return tuple((leaf.path, _filled(leaf).unsharded_shape) for leaf in leaves)


def _stored(leaves: Sequence[ParamLayout]) -> _Shapes:
    return tuple((leaf.path, _filled(leaf).stored_shape) for leaf in leaves)


def _filled(leaf: ParamLayout) -> ParamLayout:
    """The leaf, with one element if it has none, because JAX does not compute with empty leaves."""
    return leaf if leaf.count else dataclasses.replace(leaf, shape=(1,) * len(leaf.shape), shard=1)


def check_shardable(tx: optax.GradientTransformation, leaves: Sequence[ParamLayout]) -> None:
    """Refuse an optimizer that updates a flat, padded leaf differently from the model's own leaf.

    The operations of both updates must be the same. If they are not provably element by element, updates of a
    small copy of the tree (the model's paths, sides of at most 128) are compared as well.
    """
    whole, stored = _whole(leaves), _stored(leaves)
    _check_state(_programs(tx, stored))
    # Without padding a mean of flat leaves is correct, but the same model has padding on another mesh.
    padded = _stored([dataclasses.replace(leaf, shard=leaf.shard + 1) for leaf in leaves])
    proved = all(_is_proved(tx, shapes) for shapes in (whole, stored, padded))
    if not proved or _operations(tx, whole) != _operations(tx, padded):
        _compare_updates(tx, tuple((leaf.path, leaf.unsharded_shape, len(leaf.stack)) for leaf in leaves))
    if _operations(tx, whole) != _operations(tx, stored):
        raise ConfigurationError(
            "the optimizer treats flat leaves differently from the model's own: a mask that goes by sizes of "
            "leaves does so, and a shard has other sizes. Choose leaves by their path or their ndim."
        )


def _check_state(traced: "_Programs | str") -> None:
    """Refuse an optimizer whose state changes its structure or shapes in an update."""
    if isinstance(traced, _Programs):
        before, after = (jax.tree.flatten(jax.tree.map(np.shape, x)) for x in (traced.state, traced.after))
        if before != after:
            raise ConfigurationError(
                "an update gives the optimizer's state other arrays or shapes than its init (optax.monitor "
                "does), which a compiled step has no room for: leave this transform out."
            )


@_cached
def _compare_updates(tx: optax.GradientTransformation, leaves: tuple[tuple[Path, Shape, int], ...]) -> None:
    """Compare updates of a small copy of the tree; once per optimizer and model, on whichever mesh.

    Each leaf is its path, unsharded shape and number of stacked axes.
    """
    rng = np.random.default_rng(0)
    whole: dict[Path, np.ndarray] = {}
    seen: set[Shape] = set()
    for path, unsharded, stacked_axes in leaves:
        # One leaf of each shape is large enough to be factored; the others only need the right rank.
        side = 3 if unsharded in seen else _PROBE_SIDE
        seen.add(unsharded)
        shape = tuple(min(d, 2 if i < stacked_axes else side) for i, d in enumerate(unsharded))
        whole[path] = rng.standard_normal(shape).astype(np.float32)
    stacked = {path: axes > 0 for path, _, axes in leaves}
    grads = [
        {path: rng.standard_normal(x.shape).astype(np.float32) for path, x in whole.items()} for _ in range(2)
    ]

    def flat(values: _ByPath) -> dict[Path, np.ndarray]:
        return {path: _flat(x, stacked[path]) for path, x in values.items()}

    trees = [[flatten(x) for x in (whole, *grads)] for flatten in (dict, flat)]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        try:
            (wanted, found), first = _updates(tx, trees)
        except Exception as error:
            try:
                _updates(tx, trees[:1])
            except Exception as without_flat:
                raise ConfigurationError(
                    "the optimizer fails on this model's parameters, even without sharding: "
                    f"{error_line(without_flat)}. A step passes the gradients, its state and the parameters, "
                    "so it can't read the loss. Use another optimizer."
                ) from without_flat
            raise ConfigurationError(
                f"the optimizer can't work on sharded leaves, which are flat: {error} {_WAY_OUT}"
            ) from error
        _check_average(first, whole)
    for path, update in flat(wanted).items():
        # Relative to the update: while a learning rate is warming up, all updates are small.
        size = float(np.max(np.abs(update), initial=0, where=np.isfinite(update)))
        if not np.allclose(update, found[path], rtol=1e-4, atol=1e-4 * size, equal_nan=True):
            _refuse(tx, path, tuple((path, shape) for path, shape, _ in leaves))


def _refuse(tx: optax.GradientTransformation, path: Path, shapes: _Shapes) -> NoReturn:
    """Raise the error for a leaf whose flat update differs."""
    name = "/".join(path)
    if any(operation == "random_bits" for operation, _ in _operations(tx, shapes)):
        raise ConfigurationError(
            f"the optimizer draws random numbers (optax.add_noise does). For {name!r}, which a shard "
            f"stores flat and padded, it would draw other numbers than without sharding. {_WAY_OUT}"
        )
    raise ConfigurationError(
        f"the optimizer's update of {name!r} depends on the leaf's shape, which a shard does not have "
        "(Adafactor's factors, Muon, unit-wise clipping and block means do). Or it moves a weight whose "
        "gradients are all zero, such as padding (Yogi does). "
        + ("" if dict(shapes)[path] else "A scalar is stored as a vector, so choose it by its path. ")
        + _WAY_OUT
    )


def _flat(x: np.ndarray, stacked: bool) -> np.ndarray:
    """Reshape a leaf as ``ParamLayout.stored_shape`` does, with some padding."""
    stack = x.shape[:1] if stacked else ()
    rows = np.pad(x.reshape(*stack, -1), [*((0, 0) for _ in stack), (0, _PADDING)])
    return rows.reshape(*rows.shape, *(1,) * (x.ndim - rows.ndim))


def _check_average(first: "_Updated", before: _ByPath) -> None:
    """Refuse an ``average_weights`` that saw other updates than the weights got in the first update."""
    for average in jax.tree.leaves(first.state, is_leaf=lambda x: isinstance(x, AverageState)):
        if not isinstance(average, AverageState) or int(average.averaged_count) != 1:
            continue  # several gradients may make one update
        after: PyTree[Array] = optax.apply_updates(to_tree(before), first.updates)
        weights = from_tree(after)
        for path, x in from_tree(average.averaged_params).items():
            # A mask leaves out weights.
            if isinstance(x, jax.Array) and not np.allclose(x, weights[path], rtol=1e-4):
                raise ConfigurationError(
                    "average_weights averages other weights than the optimizer makes: let it come last in "
                    "its chain."
                )


class _Updated(NamedTuple):
    """The updates of a tree, and the optimizer's state after them."""

    updates: PyTree[Array]
    state: PyTree[Array]


def _updates(
    tx: optax.GradientTransformation, trees: Sequence[Sequence[_ByPath]]
) -> tuple[list[dict[Path, np.ndarray]], _Updated]:
    """Sum successive updates of trees until two of them have changed every tree; the weights stay.

    The first update of a warm-up is zero, and so are all but the last update of accumulated gradients.

    Args:
        tx: the transform.
        trees: for each tree its weights, and gradients that are used in turn.

    Returns:
        The sums, and the first update of the first tree.
    """
    given = [to_tree(params) for params, *_ in trees]
    gradients = [list(map(to_tree, each)) for each in zip(*(own for _, *own in trees), strict=True)]

    @jax.jit
    def update(states: list[PyTree], gradients: list[PyTree], given: list[PyTree]) -> list[_Updated]:
        return [_Updated(*tx.update(*each)) for each in zip(gradients, states, given, strict=True)]

    totals = jax.tree.map(np.zeros_like, given)
    states = jax.jit(lambda given: [tx.init(params) for params in given])(given)
    first, changed = None, 0
    for number in range(_MAX_UPDATES):
        updated = update(states, gradients[number % len(gradients)], given)
        states, first = [one.state for one in updated], first or updated[0]
        ones = [one.updates for one in updated]
        with np.errstate(all="ignore"):  # an optimizer may divide by zero
            totals = jax.tree.map(lambda total, x: total + np.asarray(x), totals, ones)
        changed += all(any(np.any(x) for x in jax.tree.leaves(one)) for one in ones)
        if changed == 2:
            break
    assert first is not None
    return list(map(from_tree, totals)), first


class _Programs(NamedTuple):
    """An optimizer's programs for some leaves, and its abstract state before and after an update."""

    init: core.Jaxpr
    update: core.Jaxpr
    state: PyTree[jax.ShapeDtypeStruct]
    after: PyTree[jax.ShapeDtypeStruct]


@_cached
def _programs(tx: optax.GradientTransformation, shapes: _Shapes) -> _Programs | str:
    """The programs of an optimizer for leaves of these shapes; or the error of tracing them."""
    params = to_tree({path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes})
    try:
        init, state = jax.make_jaxpr(tx.init, return_shape=True)(params)
        update, (_, after) = jax.make_jaxpr(tx.update, return_shape=True)(params, state, params)
        return _Programs(init.jaxpr, update.jaxpr, state, after)
    except Exception as error:
        return repr(error)


@_cached
def _is_proved(tx: optax.GradientTransformation, shapes: _Shapes) -> bool:
    """Whether updates of these leaves are provably element by element, and there is no average to check."""
    traced = _programs(tx, shapes)
    if isinstance(traced, str):
        return False
    parts = jax.tree.leaves(traced.state, is_leaf=lambda x: isinstance(x, AverageState))
    return not any(isinstance(part, AverageState) for part in parts) and updates_element_by_element(
        traced.init, traced.update, len(shapes)
    )


@_cached
def _operations(tx: optax.GradientTransformation, shapes: _Shapes) -> list[_Operation]:
    """The operations of an update of leaves of these shapes, in order, with their operands; or its error."""
    traced = _programs(tx, shapes)
    if isinstance(traced, str):
        return [("error", [traced])]
    found: list[_Operation] = []
    pending: list[core.Jaxpr] = [traced.init, traced.update]
    number = itertools.count()
    while pending:
        jaxpr = pending.pop()
        numbers: dict[core.Var, int | str] = {var: next(number) for var in (*jaxpr.constvars, *jaxpr.invars)}

        def of(
            atoms: Sequence[core.Var | core.Literal], numbers: Mapping[core.Var, int | str] = numbers
        ) -> list[int | str]:
            return [repr(x.val) if isinstance(x, core.Literal) else numbers[x] for x in atoms]

        for equation in jaxpr.eqns:
            if equation.primitive.name in _MOVES:
                numbers[equation.outvars[0]] = of(equation.invars)[0]
                continue
            name = equation.primitive.name
            own = str(equation.params) if name in ELEMENTWISE else ""
            found.append((name + own, of(equation.invars)))
            numbers |= {var: next(number) for var in equation.outvars}
            pending += core.jaxprs_in_params(equation.params)
        found.append(("return", of(jaxpr.outvars)))
    return found
