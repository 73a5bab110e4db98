"""The first weights of a new run, and the frozen weights of a resumed run."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from zerojax.errors import ConfigurationError
from zerojax.models.config import GPTConfig
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run import checkpoints
from zerojax.run.build import RunSetup, is_first
from zerojax.run.checkpoints import step_dirs
from zerojax.run.checkpoints.manifest import MANIFEST
from zerojax.run.config import RunConfig, saved_config
from zerojax.run.data.dataset import names_kept_tokenizer, names_kept_tokens, open_tokenizer
from zerojax.run.data.formats import DataError
from zerojax.run.data.tokenizer import Tokenizer, same_tokenizer
from zerojax.run.optimizers import rate_changes
from zerojax.run.run_dir import RunFolder, check_same_model, check_same_run
from zerojax.sharding.param_tree import from_tree, to_tree
from zerojax.train.fields import abstract_fields
from zerojax.train.state import TrainState, initial_base


class WeightReader:
    """Reads the weights of a model from checkpoints; a subclass may read other formats as well."""

    def find(self, path: Path) -> Path:
        """The place of the weights that a user's path means: a checkpoint, or the newest checkpoint of a run.

        Raises:
            ConfigurationError: there are none.
        """
        return checkpoints.find(path)

    def outputs(self, path: Path) -> int | None:
        """``GPTConfig.outputs`` of the model at a path that ``find`` returned.

        None also for a checkpoint of a custom loop, which does not record it.
        """
        return checkpoints.read_manifest(path).record.config.get("model", {}).get("outputs")

    def tokenizer(self, path: Path) -> Tokenizer | None:
        """The tokenizer of the model at a path that ``find`` returned.

        None for a checkpoint of a custom loop, or if the tokenizer's file is gone.
        """
        config = checkpoints.read_manifest(path).record.config
        if "model" not in config:
            return None
        try:
            return open_tokenizer(saved_config(config).data, RunFolder(path.parent.parent).data)
        except DataError:
            return None

    def weights(self, path: Path, state: TrainState, *, new: str | None = None) -> TrainState:
        """A filled state with the model's weights, trained and frozen.

        ``state`` need not have values for the weights that are read. ``new`` is the first name in the paths
        of trained weights that keep their values, such as "head".

        Raises:
            ConfigurationError: the weights are of another model.
        """
        return checkpoints.restore_weights(path, state, new=new)

    def base(self, path: Path, state: TrainState, *, new: str | None = None) -> TrainState:
        """A state, filled or abstract, with the model's frozen weights; arguments as for ``weights``.

        Raises:
            ConfigurationError: the weights are of another model.
        """
        return checkpoints.restore_base(path, state, new=new)


CHECKPOINTS = WeightReader()


class Start(NamedTuple):
    """A run's state before its next step.

    Attributes:
        state: the model and its optimizer.
        base: its ``Record.base``.
        notes: lines about it for the user.
        manifest: the manifest of the run's checkpoint or snapshot, if there is one.
        source: the source of a new run's weights; None if the run resumes, or starts with random weights.
    """

    state: TrainState
    base: str
    notes: list[str]
    manifest: checkpoints.Manifest | None = None
    source: Path | None = None

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return 0 if self.manifest is None else self.manifest.step

    @property
    def saved(self) -> int | None:
        """The step of the checkpoint that the run resumes from; None for a new run, or from a snapshot."""
        return None if self.manifest is None or isinstance(self.manifest, checkpoints.Snapshot) else self.step

    @property
    def record(self) -> checkpoints.Record:
        """The record saved with the checkpoint; empty for a new run."""
        return checkpoints.Record() if self.manifest is None else self.manifest.record


def start_run(
    setup: RunSetup,
    folder: RunFolder,
    manifest: checkpoints.Manifest | None,
    init_from: Path | None,
    reader: WeightReader = CHECKPOINTS,
    *,
    reference: bool = False,
) -> Start:
    """The state with which a run starts: restored from its checkpoint, or with first weights.

    A manifest without a position belongs to imported weights only. A run that resumes ignores ``init_from``.
    ``reference`` says whether the run compares itself with its first weights.

    Raises:
        ConfigurationError: the weights cannot be read, or are of another model; or the settings were changed
            to settings of another run.
    """
    if manifest is not None and manifest.record.position:
        return _resumed(setup, folder, manifest, reader)
    source = None if init_from is None else Path(run_on_process_zero(lambda: str(reader.find(init_from))))
    if manifest is not None and source is None:
        check_same_model(saved_config(manifest.record.config), setup.config, folder)
        source = folder.checkpoints / str(manifest.step)
    setup.reserve_host_memory()
    if source is None:
        return Start(setup.initial_state(), "", [])
    state, notes = first_weights(setup, source, reader)
    base = ""
    if state.spec.frozen or reference:
        base, notes = base_of(folder, source), notes + keep_for(folder, source)
    theirs = reader.tokenizer(source)
    if theirs is not None and not same_tokenizer(theirs, open_tokenizer(setup.config.data, folder.data)):
        notes.append(
            f"data.tokenizer is not the tokenizer of {source}: the weights may have learnt other tokens"
        )
    return Start(state, base, notes, manifest, source)


def changes_since(manifest: checkpoints.Manifest, config: RunConfig, folder: RunFolder) -> list[str]:
    """The changes in a run's settings since one of its checkpoints; errors as ``check_same_run``."""
    before, data = saved_config(manifest.record.config), config.data
    if data.tokenizer != before.data.tokenizer and names_kept_tokenizer(data, folder.data):
        before = replace(before, data=replace(before.data, tokenizer=data.tokenizer))
    if names_kept_tokens(data, folder.data):
        pairs = zip(before.data.mixture, data.mixture, strict=False)
        mixture = tuple(replace(old, source=new.source) for old, new in pairs)
        before = replace(before, data=replace(before.data, source=data.source, mixture=mixture))
    return check_same_run(before, config, folder)


def base_of(folder: RunFolder, source: Path) -> str:
    """The path of weights in the form of ``Record.base``: relative to the run's folder if they are in it."""
    if source.parent.resolve() == folder.checkpoints.resolve():  # which may be a link to another disk
        return f"{folder.checkpoints.name}/{source.name}"
    path, own = source.resolve(), folder.path.resolve()
    return str(path.relative_to(own) if path.is_relative_to(own) else path)


def keep_for(folder: RunFolder, source: Path) -> list[str]:
    """Ask the run of a checkpoint to keep it for this run; returns a line if that is impossible.

    Only checkpoints of other runs need this. A run that resumes finds its source by ``Record.base``, because
    the folder may have moved since.
    """
    others = source.parent.resolve() != folder.checkpoints.resolve()
    if not (others and is_first() and (source / MANIFEST).exists()):
        return []
    line = step_dirs.note_need(source.resolve(), folder.path)
    return [] if line is None else [line]


def first_weights(setup: RunSetup, source: Path, reader: WeightReader) -> tuple[TrainState, list[str]]:
    """A state at step 0 with the weights that ``reader.find`` found, and lines about it for the user.

    The head is new if the weights' model differs in ``outputs``; it may then differ in ``tied`` as well.
    """
    model, state = setup.config.model, setup.initial_state(base=False)
    new = _new_head(model, source, reader)
    if new is not None and any(leaf.path[0] == new for leaf in state.spec.frozen):
        raise ConfigurationError(
            f"zero.frozen includes the head, which is new: add '!{new}/*' to its patterns"
        )
    notes = [f"beginning with the weights of {source}"]
    if new is not None:
        notes.append(f"model.outputs = {model.outputs}: the head is new, drawn by train.seed")
    return reader.weights(source, _without_values(state, new), new=new), notes


def _without_values(state: TrainState, new: str | None) -> TrainState:
    """The state without values for the weights that are read next, so that they take no memory until then."""
    read = {leaf.path for leaf in state.spec.weights if leaf.path[0] != new}
    described = from_tree(abstract_fields(state.spec)["params"])
    params = {path: described[path] if path in read else x for path, x in from_tree(state.params).items()}
    return state.replace(params=to_tree(params))


def _new_head(model: GPTConfig, source: Path, reader: WeightReader) -> str | None:
    """ "head" if the weights at a path do not have the model's head; None if they have all weights."""
    return "head" if model.outputs not in (None, reader.outputs(source)) else None


def _resumed(
    setup: RunSetup, folder: RunFolder, manifest: checkpoints.Manifest, reader: WeightReader
) -> Start:
    record = manifest.record
    changes = changes_since(manifest, setup.config, folder)
    changes += rate_changes(saved_config(record.config), setup.config, manifest.step - record.skipped)
    setup.reserve_host_memory()
    state = with_base(setup.abstract_state, folder, record.base, setup.config, reader)
    kept = ", which is in memory" if isinstance(manifest, checkpoints.Snapshot) else ""
    notes = ["; ".join([f"resuming from step {manifest.step}{kept}", *changes])]
    notes += keep_for(folder, folder.path / record.base)
    if isinstance(manifest, checkpoints.Snapshot):
        state = manifest.restore(state)
    else:
        state = checkpoints.restore(folder.checkpoints / str(manifest.step), state, say=notes.append)
    return Start(state, record.base, notes, manifest)


def with_base(
    state: TrainState, folder: RunFolder, base: str, config: RunConfig, reader: WeightReader
) -> TrainState:
    """The abstract state of a run with its original frozen weights, if it has any.

    ``base`` is as in ``Record.base``. Frozen weights without a base are drawn by the run's seed.
    """
    if not state.spec.frozen:
        return state
    if not base:
        return initial_base(state, config.train.seed)
    path = folder.path / base  # ``base`` itself if it is absolute
    if not path.exists():
        raise ConfigurationError(
            f"{folder.path} has adapters, or trained parts, of a model. The model's other weights were in "
            f"{path}, which is gone: put it back."
        )
    return reader.base(path, state, new=_new_head(config.model, path, reader))
