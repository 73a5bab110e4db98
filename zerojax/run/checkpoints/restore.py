"""Restores a checkpoint into a train state, whatever mesh, stage or wire format wrote it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from orbax.checkpoint import v1 as ocp

from zerojax.errors import ConfigurationError
from zerojax.run.checkpoints.canonical import REINITIALISED, abstract_canonical, from_canonical, with_weights
from zerojax.train.state import TrainState


def restore(path: Path, state: TrainState, *, average: bool = False) -> TrainState:
    """Read a checkpoint into a train state.

    Args:
        path: of a verified checkpoint.
        state: gives the spec, filled or abstract; its values are not used.
        average: restore the average of the weights in their place; the optimizer of ``state`` keeps no
            average.

    Raises:
        ConfigurationError: the checkpoint has no average, or is of another model or optimizer; names the
            first differences.
    """
    saved = _saved(path)
    wanted = {
        kind: tree
        for kind, tree in abstract_canonical(state).items()
        if kind not in REINITIALISED or not _differences(tree, saved.get(kind))
    }
    if not average:
        return from_canonical(state, _load(path, wanted, saved))
    if "average" not in saved:
        raise ConfigurationError(f"{path} has no average of the weights: the run has optimizer.ema_decay = 0")
    wanted.pop("secondary", None)  # copies of the other weights
    wanted["average"] = {"params": wanted.pop("params"), "count": state.step}
    tree = _load(path, wanted, saved)
    return from_canonical(state, tree | {"params": tree.pop("average")["params"]})


def restore_weights(path: Path, state: TrainState) -> TrainState:
    """The state with a checkpoint's parameters and other model state, such as batch statistics.

    Args:
        path: of a verified checkpoint of the same model under any optimizer.
        state: filled; keeps its optimizer state, step and seed.

    Raises:
        ConfigurationError: the checkpoint is of another model; names the first differences.
    """
    wanted = {kind: tree for kind, tree in abstract_canonical(state).items() if kind in ("params", "other")}
    return with_weights(state, _load(path, wanted, _saved(path)))


def _saved(path: Path) -> dict[str, Any]:
    """Kind -> names, shapes and dtypes of its arrays."""
    return _reading(path, lambda: ocp.checkpointables_metadata(str(path.absolute())).metadata)


def _load(path: Path, wanted: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    for kind, tree in wanted.items():
        if differences := _differences(tree, saved.get(kind)):
            raise ConfigurationError(f"{path} does not fit this run: {kind}: {'; '.join(differences[:3])}")

    # One kind at a time: when one fails within a single call, Orbax never awaits the coroutines of the
    # others, and Python warns about them.
    where = str(path.absolute())
    return _reading(
        path,
        lambda: {kind: ocp.load(where, tree, checkpointable_name=kind) for kind, tree in wanted.items()},
    )


def _reading[T](path: Path, read: Callable[[], T]) -> T:
    """Call Orbax, and turn whatever it raises on an unverified file into one clear error."""
    try:
        return read()
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise ConfigurationError(f"{path} cannot be read: {reason}") from error


def _differences(wanted: Any, saved: Any) -> list[str]:
    """How the saved arrays of one kind differ from the wanted ones, by name."""
    if saved is None:
        return ["not saved"]
    have: dict[str, Any] = traverse_util.flatten_dict(saved, sep="/")
    want: dict[str, Any] = traverse_util.flatten_dict(wanted, sep="/")
    found = [f"{name} is missing" for name in want if name not in have]
    found += [f"{name} is unknown" for name in have if name not in want]
    return found + [
        f"{name} is {have[name].dtype}{list(have[name].shape)}, not {x.dtype}{list(x.shape)}"
        for name, x in want.items()
        if name in have
        and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        and (have[name].shape, have[name].dtype) != (x.shape, x.dtype)
    ]
