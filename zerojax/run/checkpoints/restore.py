"""Restores a checkpoint into a train state, whatever mesh, stage or wire format wrote it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import traverse_util
from orbax.checkpoint import v1 as ocp

from zerojax.errors import ConfigurationError, error_line
from zerojax.log import warn
from zerojax.run.checkpoints.canonical import (
    abstract_average,
    abstract_canonical,
    abstract_saved,
    from_canonical,
    with_weights,
)
from zerojax.run.checkpoints.conversion import abstract_part, in_each_node, mean_over_nodes
from zerojax.run.checkpoints.entries import AVERAGE, NODES, OPTIMIZER, REINITIALISED, Entry
from zerojax.run.checkpoints.manifest import Record
from zerojax.run.checkpoints.portions import read_in_portions
from zerojax.run.checkpoints.select import choose
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.memory import in_host
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.train.frozen import encode_one, frozen_fields
from zerojax.train.state import TrainState

# Until 29 November 2026 a router's counts were fp32, and every block with dropout kept a number in its state.
_FORMER_FLOATS, _FORMER_NAMES = ("load",), ("salt",)
_PARTIAL = ocp.options.PyTreeOptions(loading=ocp.options.PyTreeOptions.Loading(partial_load=True))


def restore(
    path: Path | str,
    state: TrainState,
    *,
    average: bool = False,
    name: str = "",
    say: Callable[[str], object] = warn,
) -> TrainState:
    """Read a checkpoint into a train state.

    Args:
        path: a verified checkpoint.
        state: gives the spec, filled or abstract; its values are not used.
        average: restore the average of the weights in place of the weights; the optimizer of ``state`` keeps
            no average. Without it, a state that has no optimizer gets the mean of the nodes' own weights if
            the checkpoint was saved with local updates.
        name: the name of a further state that was saved together with the run's state.
        say: called on every process with one line if the nodes lose their own weights or moments; by default
            the first process logs it.

    Raises:
        ConfigurationError: the checkpoint has no such state or no average, or is of another model or
            optimizer; names the first differences.
    """
    checkpoint = _Checkpoint(path, name)
    saved, nodes = checkpoint.saved, checkpoint.nodes
    if (line := _line_on_nodes(state, nodes)) is not None:
        say(line)
    wanted = {
        kind: tree
        for kind, tree in abstract_saved(state, nodes).items()
        if kind not in REINITIALISED or not _differences(tree, saved.get(kind))
    }
    if OPTIMIZER in saved and OPTIMIZER not in wanted and state.spec.tx is not None and not average:
        raise ConfigurationError(
            f"{checkpoint.path} does not fit this run: it has the state of another optimizer, and this one "
            "keeps none. restore_weights reads the weights alone."
        )
    if not average:
        outer = _outer(wanted.get(OPTIMIZER, {}), saved.get(OPTIMIZER) or {})
        if outer is not None:
            wanted[OPTIMIZER] = wanted[OPTIMIZER][outer]
        places = _places(wanted.get(OPTIMIZER, {}), saved.get(OPTIMIZER) or {})
        means = {}
        if nodes and state.spec.tx is None:
            params = wanted.pop("params")
            checkpoint.check_fits({"params": params})
            means = {"params": checkpoint.load_params(state, params)}
        tree = means | checkpoint.load(_renamed(wanted, places))
        tree = _renamed(tree, {new: old for old, new in places.items()})
        return from_canonical(state, tree if outer is None else tree | {OPTIMIZER: {outer: tree[OPTIMIZER]}})
    if AVERAGE not in saved:
        raise ConfigurationError(
            f"{checkpoint.path} has no average of the weights, because its run has optimizer.ema_decay = 0: "
            "leave out --ema (average=True)"
        )
    wanted.pop("secondary", None)  # replicas of the weights that the average replaces
    del wanted["params"]
    tree = checkpoint.load(wanted | {AVERAGE: abstract_average(state, nodes)})
    return from_canonical(state, tree | {"params": tree.pop(AVERAGE)["params"]})


def _line_on_nodes(state: TrainState, saved: int | None) -> str | None:
    """The line about arrays that local updates lose because the number of nodes changed, or None."""
    if state.spec.tx is None:
        return None  # the state takes the weights alone
    own = state.spec.world.nodes if state.spec.local_updates else None
    if own == saved:
        return None
    if saved is None:
        return (
            f"the checkpoint was saved without local updates: all {own} nodes begin with its weights and its "
            "optimizer's moments"
        )
    by, moments = (
        f"saved by {saved} nodes with local updates",
        "the mean over nodes of the optimizer's moments",
    )
    if own is None:
        return (
            f"the checkpoint was {by}: the outer weights and {moments} are kept; what only single nodes had "
            "learnt, and the outer momentum, are lost"
        )
    return (
        f"the checkpoint was {by}, and this run has {own}: every node begins with the outer weights and "
        f"{moments}. The outer momentum is kept; what only single nodes had learnt is lost"
    )


def _outer(wanted: dict[str, Any], saved: dict[str, Any]) -> str | None:
    """The place in the chain of transforms that the whole saved state has now that an average was added."""
    (name, part), *others = wanted.items() if wanted else [("", None)]
    alone = isinstance(part, dict) and not others and bool(saved)
    return name if alone and not _differences(part, saved) else None


def _places(wanted: dict[str, Any], saved: dict[str, Any]) -> dict[str, str]:
    """New place -> saved place of each part of a chain of transforms.

    Parts are named by their place in the chain. The place changes when a transform without a state is added
    or removed, such as gradient clipping or weight decay.
    """
    if len(wanted) != len(saved) or not all(name.isdecimal() for name in (*wanted, *saved)):
        return {}
    return dict(zip(sorted(wanted, key=int), sorted(saved, key=int), strict=True))


def _renamed(tree: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    if OPTIMIZER not in tree:
        return tree
    return tree | {OPTIMIZER: {places.get(name, name): x for name, x in tree[OPTIMIZER].items()}}


def restore_weights(path: Path | str, state: TrainState, *, new: str | None = None) -> TrainState:
    """The state with a checkpoint's parameters and other model state, such as batch statistics.

    Adapters keep their values, because such a checkpoint has none. If it was saved with local updates, the
    parameters are the mean of the nodes' own.

    Args:
        path: a verified checkpoint of the same model under any optimizer.
        state: filled, except perhaps for the weights that are read; keeps its optimizer state, step, seed.
        new: the first name in the paths of trained weights that keep their values, because the checkpoint has
            others or none there: "head" of a model with other outputs.

    Raises:
        ConfigurationError: the checkpoint is of another model, or holds adapters alone; names the first
            differences.
    """
    checkpoint = _checkpoint_of_model(path, state, new)
    state = _with_base(checkpoint, state)
    every = abstract_canonical(state)
    own = {leaf.path for leaf in state.spec.weights if leaf.path[0] != new}
    params = to_tree({at: x for at, x in from_tree(every.get("params", {})).items() if at in own})
    found = checkpoint.load({kind: tree for kind, tree in every.items() if kind == "other"})
    if params:
        found["params"] = checkpoint.load_params(state, params)
    return with_weights(state, found)


def restore_base(path: Path | str, state: TrainState, *, new: str | None = None) -> TrainState:
    """The state with its frozen weights from a checkpoint of the whole model.

    The weights are read and encoded one by one, so that only one whole weight is in memory besides the state,
    spread over the devices.

    Args:
        path: a verified checkpoint of the same model under any optimizer, with all weights trained.
        state: filled or abstract.
        new: as for ``restore_weights``.

    Raises:
        ConfigurationError: the checkpoint is of another model, or holds adapters alone.
    """
    if not state.spec.frozen:
        return state
    return _with_base(_checkpoint_of_model(path, state, new), state)


class _Checkpoint:
    """A verified checkpoint, or the part of it that belongs to one state.

    ``saved`` is kind -> names, shapes and dtypes of its arrays. ``nodes`` is the number of nodes that saved
    it with local updates, or None.
    """

    def __init__(self, path: Path | str, name: str = "") -> None:
        """Read which arrays were saved for the state called ``name``, or for the run's if that is empty."""
        self.path = Path(path)
        self._prefix = prefix = f"{name}_" if name else ""
        every = self._reading(lambda: ocp.checkpointables_metadata(str(self.path.absolute())).metadata)
        self.saved = {kind.removeprefix(prefix): x for kind, x in every.items() if kind.startswith(prefix)}
        self.nodes = self.saved[NODES]["skipped_in_row"].shape[0] if NODES in self.saved else None

    def check_fits(self, wanted: dict[str, Any]) -> None:
        """Raises if some kinds have other arrays than the wanted ones."""
        for kind, tree in wanted.items():
            if differences := _differences(tree, self.saved.get(kind)):
                raise ConfigurationError(
                    f"{self.path} does not fit this run: {self._prefix}{kind}: {'; '.join(differences[:3])}. "
                    "Use the model and the optimizer that it was saved with"
                )

    def load(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Load arrays like the ``wanted`` ones, ShapeDtypeStructs, by kind; errors as for ``check_fits``."""
        self.check_fits(wanted)
        # One kind at a time: if one of several in a call fails, Orbax never awaits the coroutines of the
        # others, and Python warns about them.
        return self._reading(lambda: {kind: self._load_here(kind, tree) for kind, tree in wanted.items()})

    def load_params(self, state: TrainState, params: Any) -> Any:
        """Load some weights in canonical form, for a state that uses nothing else of the checkpoint.

        With local updates this is the mean of the nodes' own weights. The outer weights would be worse: on
        average each fragment of them is half a round old, and older with a delay (docs/quality.md). The
        nodes' weights are read one by one, because all of them together may not fit into memory.
        """
        nodes, wanted = self.nodes, from_tree(params)

        def mean(at: tuple[str, ...], like: jax.ShapeDtypeStruct, nodes: int) -> jax.Array:
            each = {"weights": to_tree({at: in_each_node(state.spec, like, nodes)})}
            found = from_tree(self._load_kind(NODES, each)["weights"])
            return jax.block_until_ready(mean_over_nodes(state.spec, found[at]))

        if nodes is None:
            return self._reading(lambda: self._load_here("params", params))
        return self._reading(lambda: to_tree({at: mean(at, like, nodes) for at, like in wanted.items()}))

    def _load_here(self, kind: str, tree: Any) -> Any:
        """Like ``_load_kind``.

        An array for host memory becomes a function that reads it straight into place.
        """
        every: dict[str, Any] = traverse_util.flatten_dict(tree, sep="/")
        found: dict[str, Any] = {name: self._reader(kind, name) for name, x in every.items() if in_host(x)}
        if now := {name: x for name, x in every.items() if name not in found}:
            loaded = self._load_kind(kind, traverse_util.unflatten_dict(now, sep="/"))
            found |= traverse_util.flatten_dict(loaded, sep="/")
        return traverse_util.unflatten_dict(found, sep="/")

    def _load_kind(self, kind: str, tree: Any) -> Any:
        """Load some or all arrays of a kind; ``check_fits`` knows which others may be there."""
        with ocp.Context(pytree_options=_PARTIAL):
            return ocp.load(str(self.path.absolute()), tree, checkpointable_name=self._prefix + kind)

    def _reader(self, kind: str, name: str) -> Callable[[TrainState, Entry], jax.Array]:
        read = read_in_portions(self.path / (self._prefix + kind), name)
        return lambda state, entry: self._reading(lambda: read(state, entry))

    def _reading[T](self, read: Callable[[], T]) -> T:
        """Call Orbax, and turn any error that it raises on an unverified file into one clear message."""
        try:
            return read()
        except Exception as error:
            raise ConfigurationError(f"{self.path} cannot be read: {error_line(error)}") from error


def _checkpoint_of_model(path: Path | str, state: TrainState, new: str | None) -> _Checkpoint:
    """A checkpoint that holds the model's weights."""
    checkpoint = _Checkpoint(path)
    # A checkpoint has no arrays without elements.
    wanted = to_tree(
        {leaf.path: abstract_part(state.spec, leaf) for leaf in state.spec.weights if leaf.count}
    )
    params = checkpoint.saved.get("params")
    if new is not None and params is not None:
        wanted, params = ({k: v for k, v in tree.items() if k != new} for tree in (wanted, params))
    if differences := _differences(wanted, params):
        if "base" in checkpoint.saved:
            raise ConfigurationError(
                f"{checkpoint.path} holds only what its run trained beside frozen weights: `zerojax export` "
                "that run, and begin with the exported folder"
            )
        raise ConfigurationError(
            f"{checkpoint.path} does not fit this run: params: {'; '.join(differences[:3])}. Use the model "
            "that it was saved with"
        )
    return checkpoint


def _with_base(checkpoint: _Checkpoint, state: TrainState) -> TrainState:
    """``restore_base`` from a checkpoint that holds the model's weights."""
    spec = state.spec
    if not spec.frozen:
        return state

    def weight(leaf: ParamLayout) -> jax.Array:
        like = abstract_part(spec, leaf)
        if not leaf.count:
            return jnp.zeros(like.shape, like.dtype)
        return from_tree(checkpoint.load_params(state, to_tree({leaf.path: like})))[leaf.path]

    encoded = ((leaf.path, *encode_one(spec, leaf, weight(leaf))) for leaf in spec.frozen)
    return state.replace(**frozen_fields(spec, encoded))


def _differences(wanted: Any, saved: Any) -> list[str]:
    """The differences between the saved and the wanted arrays of one kind, by name."""
    if saved is None:
        return ["not saved"]
    have: dict[str, Any] = traverse_util.flatten_dict(saved, sep="/")
    want: dict[str, Any] = traverse_util.flatten_dict(wanted, sep="/")
    found = [f"{name} is missing" for name in want if name not in have]
    unknown = [name for name in have if name not in want and name.rpartition("/")[2] not in _FORMER_NAMES]
    found += [f"{name} is unknown" for name in unknown]
    return found + [
        f"{name} is {have[name].dtype}{list(have[name].shape)}, not {x.dtype}{list(x.shape)}"
        for name, x in want.items()
        if name in have and not _is_read_as(name, x, have[name])
    ]


def _is_read_as(name: str, wanted: Any, saved: Any) -> bool:
    """Whether Orbax can read an array as the wanted one: it converts between floating-point dtypes."""
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        return True
    compared = (saved,) if name.rpartition("/")[2] in _FORMER_FLOATS else (wanted, saved)
    floating = all(jnp.issubdtype(x.dtype, jnp.floating) for x in compared)
    return wanted.shape == saved.shape and (wanted.dtype == saved.dtype or floating)


class Resumed(NamedTuple):
    """A restored checkpoint.

    Attributes:
        state: the model and its optimizer.
        step: the checkpoint's step.
        record: the record saved with it, such as the ``position`` in the data.
    """

    state: TrainState
    step: int
    record: Record


def resume(
    folder: Path | str,
    state: TrainState,
    *,
    checksums: bool = True,
    say: Callable[[str], object] = print,
) -> Resumed | None:
    """Restore the newest valid checkpoint of a folder, whatever mesh, stage or wire format wrote it.

    All processes must call it; the first one chooses for all. Newer checkpoints that are damaged are renamed
    (``400.damaged``), so that their steps can be saved again.

    Args:
        folder: the checkpoints' folder, as for ``Checkpoints``; need not exist.
        state: gives the spec, filled or abstract (``TrainState.abstract``); its values are not used.
        checksums: read every byte of the checkpoint first; otherwise compare names and sizes only.
        say: prints a line for each damaged checkpoint, on the first process. It prints one more if the number
            of nodes with local updates has changed (``restore``).

    Returns:
        None if there is no checkpoint yet: then create a state by ``TrainState.create``.

    Raises:
        ConfigurationError: all checkpoints are damaged, or the newest valid one is of another model or
            optimizer.
    """
    manifest, damaged = choose(Path(folder), checksums=checksums)

    def say_once(line: str) -> None:
        if jax.process_index() == 0:
            say(line)

    for line in damaged:
        say_once(line)
    if manifest is None:
        return None
    state = restore(Path(folder) / str(manifest.step), state, say=say_once)
    return Resumed(state, manifest.step, manifest.record)
