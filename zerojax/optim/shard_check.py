"""Checks that an optimizer is correct on shards.

An optimizer sees the model's own tree as global arrays, each leaf flat and padded but of its unsharded rank
(``ParamLayout.stored_shape``). Norms over a leaf or over the whole tree are therefore correct, and padding
stays zero. One that chooses leaves by their ndim is given the layers of a stack in a row, as leaves of one
layer's ndim. An optimizer that uses a leaf's shape (Adafactor's factors, Muon's matrices) is not correct. The
check finds it by comparing updates of unsharded and of flat leaves on a small copy of the tree.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from zerojax.errors import ConfigurationError
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
"""Its name, and its operands: numbers of earlier results, or constants."""
_WAY_OUT = (
    "Use a transform that works element by element, or by norms of whole leaves; for Muon, "
    "zerojax.scale_by_muon."
)


_TRACED_BY = ("enable_x64", "numpy_dtype_promotion", "numpy_rank_promotion", "default_matmul_precision")
"""The options of JAX's config that change how an optimizer is traced."""


def _cached[*Args, T](function: Callable[[*Args], T]) -> Callable[[*Args], T]:
    """``functools.lru_cache``, under JAX's present config."""

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

    It is not checked; its author must make sure that it is correct on shards.

    Attributes:
        make: from the mesh, the layouts and the options to the transform of stored leaves.
        whole: whether it needs a parameter whole; None if it needs none. With
            ``ZeroConfig.matrix_spread="node"`` every node holds those, spread over its devices.
    """

    make: Callable[[Mesh, Sequence[ParamLayout], ZeroConfig], optax.GradientTransformation]
    whole: Whole | None = None

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse what optax's own combinators do.

        Raises:
            ConfigurationError: for the functions of an optax transform.
            AttributeError: for all else.
        """
        if name in ("init", "update"):
            raise ConfigurationError(
                "a transform that is built for a mesh, as zerojax.scale_by_muon, can't be a part of optax's "
                "chain, masked, partition or MultiSteps: combine it with others by zerojax.chain. It chooses "
                "its weights itself (is_matrix=), and ZeroConfig(accumulate=) sums gradients before it."
            )
        raise AttributeError(name)


Optimizer = optax.GradientTransformation | OnLayout


def chain(*parts: Optimizer) -> Optimizer:
    """``optax.chain`` for parts of which some may be ``OnLayout``.

    Examples:
        >>> tx = zerojax.chain(optax.clip_by_global_norm(1.0), zerojax.scale_by_muon(), optax.scale(-1e-3))
    """
    if not any(isinstance(part, OnLayout) for part in parts):
        return optax.chain(*(part for part in parts if not isinstance(part, OnLayout)))

    def make(mesh: Mesh, leaves: Sequence[ParamLayout], zero: ZeroConfig) -> optax.GradientTransformation:
        return optax.chain(*(on_shards(part, mesh, leaves, zero) for part in parts))

    whole = [part.whole for part in parts if isinstance(part, OnLayout) and part.whole]
    return OnLayout(make, (lambda leaf: any(needed(leaf) for needed in whole)) if whole else None)


def on_shards(
    tx: Optimizer, mesh: Mesh, leaves: Sequence[ParamLayout], zero: ZeroConfig
) -> optax.GradientTransformation:
    """The transform that a step runs on stored leaves.

    Raises:
        ConfigurationError: as ``check_shardable``.
    """
    if isinstance(tx, OnLayout):
        return tx.make(mesh, leaves, zero)
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
    """The leaf, or one of an element in place of one of none, which JAX does not compute with."""
    return leaf if leaf.count else dataclasses.replace(leaf, shape=(1,) * len(leaf.shape), shard=1)


def check_shardable(tx: optax.GradientTransformation, leaves: Sequence[ParamLayout]) -> None:
    """Refuse an optimizer whose update of a flat, padded leaf differs from that of the leaf itself.

    Updates of a small copy of the tree (the model's own paths, sides of at most 128) are compared, and the
    operations of an update of the tree itself.

    Raises:
        ConfigurationError: naming the leaf on which they differ, or the optimizer's error.
    """
    _compare_updates(tx, tuple((leaf.path, leaf.unsharded_shape, len(leaf.stack)) for leaf in leaves))
    _check_average(tx, _whole(leaves))
    if _operations(tx, _whole(leaves)) != _operations(tx, _stored(leaves)):
        raise ConfigurationError(
            "the optimizer does other things to flat leaves than to those of the model: a mask that goes by "
            "sizes of leaves does so, which a shard does not have. Choose leaves by their path or their ndim."
        )


@_cached
def _check_average(tx: optax.GradientTransformation, shapes: _Shapes) -> None:
    """Refuse an average of weights (``average_weights``) that sees other updates than the weights get.

    Raises:
        ConfigurationError: it does not come last in its chain.
    """

    def averages(state: PyTree) -> list[AverageState]:
        parts = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AverageState))
        return [part for part in parts if isinstance(part, AverageState)]

    @jax.jit
    def update(params: PyTree[Array]) -> tuple[PyTree[Array], list[AverageState]]:
        updates, state = tx.update(jax.tree.map(lambda x: x / 4, params), tx.init(params), params)
        return optax.apply_updates(params, updates), averages(state)

    params = to_tree({path: np.ones([min(d, 2) for d in shape], np.float32) for path, shape in shapes})
    if not averages(jax.eval_shape(tx.init, params)):
        return
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        after, found = update(params)
    weights = from_tree(after)
    for average in found:
        for path, x in from_tree(average.averaged_params).items():
            # A mask leaves out weights, and several gradients may make one update.
            first = isinstance(x, jax.Array) and int(average.averaged_count) == 1
            if first and not np.allclose(x, weights[path], rtol=1e-4):
                raise ConfigurationError(
                    "average_weights averages other weights than the optimizer makes: let it come last in "
                    "its chain."
                )


@_cached
def _compare_updates(tx: optax.GradientTransformation, leaves: tuple[tuple[Path, Shape, int], ...]) -> None:
    """Compare updates of a small copy of the tree; once per optimizer and model, on whichever mesh.

    Of each leaf it takes path, unsharded shape and number of stacked axes.

    Raises:
        ConfigurationError: as ``check_shardable``.
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
    grads = [
        {path: rng.standard_normal(x.shape).astype(np.float32) for path, x in whole.items()} for _ in range(2)
    ]
    stacked = {path: axes > 0 for path, _, axes in leaves}

    def flat(values: _ByPath) -> dict[Path, np.ndarray]:
        return {path: _flat(x, stacked[path]) for path, x in values.items()}

    trees = [[flatten(x) for x in (whole, *grads)] for flatten in (dict, flat)]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        try:
            wanted, found = _updates(tx, trees)
        except Exception as error:
            _refuse_without_update(tx, trees[:1])
            raise ConfigurationError(
                f"the optimizer can't work on sharded leaves, which are flat: {error} {_WAY_OUT}"
            ) from error
    for path, update in flat(wanted).items():
        # Relative to the update: while a learning rate is warming up, all updates are small.
        size = float(np.max(np.abs(update), initial=0, where=np.isfinite(update)))
        if not np.allclose(update, found[path], rtol=1e-4, atol=1e-4 * size, equal_nan=True):
            shapes = tuple((path, shape) for path, shape, _ in leaves)
            if any(name == "random_bits" for name, _ in _operations(tx, shapes)):
                raise ConfigurationError(
                    "the optimizer draws random numbers (optax.add_noise does), and others for the flat, "
                    f"padded leaf {'/'.join(path)!r} than for the model's own. {_WAY_OUT}"
                )
            raise ConfigurationError(
                f"the optimizer's update of {'/'.join(path)!r} depends on the leaf's shape, which a shard "
                "does not have (Adafactor's factors, Muon, unit-wise clipping and block means do), or it "
                "moves a weight whose gradients are all zero, such as padding (Yogi does). "
                + ("" if whole[path].ndim else "A scalar is stored as a vector, so choose it by its path. ")
                + _WAY_OUT
            )


def _flat(x: np.ndarray, stacked: bool) -> np.ndarray:
    """Reshape a leaf as ``ParamLayout.stored_shape`` does, with some padding."""
    rows = x.reshape(x.shape[0] if stacked else 1, -1)
    padded = np.pad(rows, ((0, 0), (0, _PADDING)))
    rank = max(1, x.ndim - (1 if stacked else 0))
    shape = (padded.shape[1], *(1,) * (rank - 1))
    return padded.reshape(x.shape[0], *shape) if stacked else padded.reshape(shape)


def _refuse_without_update(tx: optax.GradientTransformation, trees: Sequence[Sequence[_ByPath]]) -> None:
    """Refuse an optimizer that makes no update of ordinary leaves.

    Raises:
        ConfigurationError: with the optimizer's error.
    """
    try:
        _updates(tx, trees)
    except Exception as error:
        raise ConfigurationError(
            "the optimizer can't make an update from gradients, its state and parameters alone, which "
            f"are what a step gives it (one that reads the loss can't): {error}"
        ) from error


def _updates(
    tx: optax.GradientTransformation, trees: Sequence[Sequence[_ByPath]]
) -> list[dict[Path, np.ndarray]]:
    """The sums of successive updates of trees: of as many as it takes until two have changed all of these.

    The first of a warm-up is zero, and so are those of accumulated gradients until the last of them.

    A tree is its parameters, and gradients of which one after the other is used, again and again.
    """
    given = [to_tree(params) for params, *_ in trees]
    gradients = [list(map(to_tree, each)) for each in zip(*(own for _, *own in trees), strict=True)]

    @jax.jit
    def update(
        states: list[PyTree[Array]], gradients: list[PyTree[Array]], given: list[PyTree[Array]]
    ) -> tuple[list[PyTree[Array]], list[PyTree[Array]]]:
        pairs = list(map(tx.update, gradients, states, given))
        return [one for one, _ in pairs], [state for _, state in pairs]

    totals = [{path: np.zeros_like(x) for path, x in params.items()} for params, *_ in trees]
    states = jax.jit(lambda given: [tx.init(params) for params in given])(given)
    changed = 0
    for number in range(_MAX_UPDATES):
        updates, states = update(states, gradients[number % len(gradients)], given)
        ones = [{path: np.asarray(x) for path, x in from_tree(one).items()} for one in updates]
        with np.errstate(all="ignore"):  # an optimizer may divide by zero
            totals = [
                {path: total[path] + x for path, x in one.items()}
                for total, one in zip(totals, ones, strict=True)
            ]
        changed += all(any(x.any() for x in one.values()) for one in ones)
        if changed == 2:
            break
    return totals


@_cached
def _operations(tx: optax.GradientTransformation, shapes: _Shapes) -> list[_Operation]:
    """The operations of an update of leaves of these shapes, in order, and of which results; or its error."""
    params = to_tree({path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes})
    try:
        traced = jax.make_jaxpr(lambda params: tx.update(params, tx.init(params), params))(params)
    except Exception as error:
        return [("error", [repr(error)])]
    found: list[_Operation] = []
    pending: list[core.Jaxpr] = [traced.jaxpr]
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
            found.append((equation.primitive.name, of(equation.invars)))
            numbers |= {var: next(number) for var in equation.outvars}
            pending += core.jaxprs_in_params(equation.params)
        found.append(("return", of(jaxpr.outvars)))
    return found
