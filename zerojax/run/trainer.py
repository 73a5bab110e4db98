"""``zerojax.Trainer``: the loop of ``zerojax train`` for your own batches and models."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from rich.table import Table

from zerojax.comm.gather import gather_from_all
from zerojax.errors import ConfigurationError, RunError
from zerojax.formatting import html
from zerojax.log import logger, warn
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.multihost.peers import Peers
from zerojax.multihost.preemption import StopRequest
from zerojax.multihost.watchdog import Watchdog
from zerojax.run.build import make_watchdog
from zerojax.run.checkpoints import Checkpoints, Record, Retention, TrainingClock, reserve_for_saves, resume
from zerojax.run.config import ClusterSection
from zerojax.run.evaluation import mean_metrics
from zerojax.run.loop import TrainLoop
from zerojax.run.metrics.log import RunLog
from zerojax.run.run_dir import RunFolder, RunLock
from zerojax.run.trackers import check_trackers
from zerojax.train.state import TrainState, check_there, first_state, initial_base
from zerojax.train.step import Metrics
from zerojax.validation.bounds import require
from zerojax.validation.spelling import suggests
from zerojax.validation.untrusted import short

_VALIDATION = "validation_"
Evaluate = Callable[[TrainState], Mapping[str, jax.Array | float]]


class Callback:
    """Methods that a ``Trainer`` calls on every process; override the ones that you need.

    Set ``trainer.should_stop = True`` to end ``fit`` one step later, on all processes and with a save:

        class StopEarly(zerojax.Callback):
            def on_log(self, trainer, step, values):
                trainer.should_stop = values.get("validation_loss", 9.0) < 2.0
    """

    def on_train_begin(self, trainer: "Trainer") -> None:
        """Called when ``fit`` begins."""

    def on_step_end(self, trainer: "Trainer") -> None:
        """Called after each dispatched step; ``trainer.step`` and ``trainer.state`` include it."""

    def on_log(self, trainer: "Trainer", step: int, values: Mapping[str, float]) -> None:
        """Called up to two steps later with a step's metrics, and its evaluation's (``validation_...``)."""

    def on_save(self, trainer: "Trainer") -> None:
        """Called when the save of a checkpoint of ``trainer.step`` has started."""

    def on_train_end(self, trainer: "Trainer") -> None:
        """Called when ``fit`` has taken its last step and saved."""


@suggests
class Trainer(TrainLoop):
    """Trains a state on batches, and evaluates, logs, saves and resumes it.

    If the same program runs again with the same folder, it continues from the newest checkpoint, bit for bit
    as if it had not been interrupted. On SIGTERM and SIGINT it saves, then raises ``SystemExit`` with code
    75. The folder gets ``metrics.jsonl``, ``checkpoints/`` and the trackers' files. All processes of a job
    run the same program.

    Examples:
        >>> trainer = zerojax.Trainer(state, evaluate=[batch], evaluate_every=50)  # a folder saves, too
        >>> state = trainer.fit(itertools.repeat(batch), steps=2)
        step 2/2 | loss 1... | validation ...
        >>> int(state.step)
        2

    Args:
        state: from ``TrainState.create``, or without values from ``TrainState.abstract``. Without values, the
            trainer creates the state or restores it. ``fit`` donates it; use ``Trainer.state``.
        folder: for all files; None writes none, and saves nothing.
        evaluate: batches for the evaluation: their mean loss is "validation_loss", and the means of the
            loss's aux get the same prefix. Or a function of the state that returns scalars by name, which get
            that prefix.
        evaluate_every: steps between evaluations; there is always one at the end.
        save_every: steps between checkpoints; there is always one at the end, unless that step was skipped
            and no evaluation shows that the weights are good.
        save_minutes: also save when the last checkpoint is this many minutes old; 0 turns this off.
        retention: which checkpoints to keep; the newest two by default.
        callbacks: called in this order.
        trackers: "tensorboard", "wandb", "mlflow".
        project: project of Weights & Biases; experiment of MLflow.
        settings: shown by trackers; plain values, possibly nested.
        log_every: steps between progress lines if the output is neither a terminal nor a notebook.
        max_skips: ``fit`` raises after this many steps in a row without an update, because the loss or
            gradient is not finite or the loss is a spike.
        seed: seed of a state without values.
        peers: from ``distributed.joined()``: a step that hangs then ends all processes.

    Attributes:
        state: the model and its optimizer.
        step: optimizer steps done.
        should_stop: set it to end ``fit`` one step later.

    Raises:
        ConfigurationError: an argument is wrong, or the folder's checkpoints are of another model.
    """

    advice = "Lower the learning rate, clip gradients, give the state a SpikeRule, or look at the data"

    def __init__(
        self,
        state: TrainState,
        folder: Path | str | None = None,
        *,
        evaluate: Iterable[Any] | Evaluate | None = None,
        evaluate_every: int = 0,
        save_every: int = 0,
        save_minutes: float = 0.0,
        retention: Retention | None = None,
        callbacks: Sequence[Callback] = (),
        trackers: Sequence[str] = (),
        project: str = "zerojax",
        settings: Mapping[str, Any] = MappingProxyType({}),
        log_every: int = 10,
        max_skips: int = 10,
        seed: int = 0,
        peers: Peers | None = None,
    ) -> None:
        for name, value, least in (
            ("evaluate_every", evaluate_every, 0),
            ("save_every", save_every, 0),
            ("save_minutes", save_minutes, 0),
            ("log_every", log_every, 1),
            ("max_skips", max_skips, 1),
        ):
            require(value >= least, f"{name} must be {least} or more, not {value!r}")
        require(
            evaluate is not None or not evaluate_every,
            "evaluate_every needs evaluate=: batches, or a function of the state",
        )
        for name, value in {
            "save_every": save_every, "save_minutes": save_minutes, "trackers": trackers, "peers": peers
        }.items():  # fmt: skip
            require(folder is not None or not value, f"{name} needs folder=, for its files")
        check_trackers(trackers)
        require(
            isinstance(callbacks, Sequence) and all(isinstance(one, Callback) for one in callbacks),
            f"callbacks={callbacks!r}: give a list of zerojax.Callback",
        )
        require(
            retention is None or isinstance(retention, Retention),
            f"retention={retention!r}: give a checkpoints.Retention, such as Retention(newest=3)",
        )
        self.folder = (
            None if folder is None else RunFolder(Path(folder).absolute())
        )  # for callbacks that chdir
        self.lock = self.checkpoints = None
        self.watchdog = Watchdog(logger.warning)  # without limits
        self._evaluate = evaluate if evaluate is None or callable(evaluate) else list(_several(evaluate))
        require(self._evaluate != [], "evaluate has no batch: leave it out, or give some")
        self._evaluate_every = None if evaluate is None else evaluate_every
        self._save_every = None if folder is None else save_every
        self._save_minutes = save_minutes
        self._retention = retention or Retention(newest=2)
        self._callbacks = callbacks
        self._make_log = functools.partial(
            RunLog,
            self.folder,
            listener=self._tell,
            every=log_every,
            max_skips=max_skips,
            trackers=trackers,
            project=project,
            settings=settings,
            spikes="none" if state.spec.spikes is None else "skip",
        )
        self._peers = peers
        self._source: _Source | None = None
        self._fits, self._steps = -1, 0
        self._saved: int | None = None
        self._record = Record()
        if isinstance(state.step, jax.ShapeDtypeStruct):
            state = initial_base(state, seed)
        else:
            check_there(state)
        found = None if self.folder is None else resume(self.folder.checkpoints, state)
        if found is not None:
            state, self._saved, self._record = found
            warn(f"{folder}: resuming from step {found.step}")
        elif isinstance(state.step, jax.ShapeDtypeStruct):
            state = first_state(state, seed)
        self.state = state
        self.step = int(state.step)
        if self.folder is not None:
            reserve_for_saves([state])

    def __repr__(self) -> str:
        """The step, the mesh, the folder and the losses of the last logged step."""
        return f"<Trainer: {', '.join(f'{name} {value}' for name, value in self._facts().items())}>"

    def _repr_html_(self) -> str:
        """A table of the same facts, for notebooks."""
        table = Table("trainer", "")
        for row in self._facts().items():
            table.add_row(*row)
        return html(table)

    def _facts(self) -> dict[str, str]:
        """The facts that represent a trainer, by name."""
        world = self.state.spec.world
        facts = {"step": str(self.step), "mesh": f"{world.nodes} x {world.local}"}
        if self.folder is not None:
            facts["folder"] = str(self.folder.path)
        last = self.log.last if self._fits >= 0 and hasattr(self, "log") else {}
        shown = ("loss", "validation_loss")
        return facts | {name.replace("_", " "): f"{last[name]:.4f}" for name in shown if name in last}

    def fit(self, batches: Iterable[Any], steps: int) -> TrainState:
        """Train until ``steps`` optimizer steps are done, including steps before a restart.

        Each call continues the one before. It returns at once if that many steps are done already.

        Args:
            batches: this process's part of each batch. An iterator with ``get_state`` and ``set_state``
                (plain values), such as grain's, resumes by them. Any other iterator is read again from the
                start, so it must give the same batches again. A list or another iterable is repeated. If the
                next call gets the same object, it continues at the position reached.
            steps: steps of the whole training.

        Returns:
            The state, which is also ``Trainer.state``.

        Raises:
            ConfigurationError: the position of the batches cannot be saved, or was saved by another number of
                processes; or another process uses the folder.
            DivergedError: ``max_skips`` steps in a row made no update.
            RunError: the batches ended, or the disk is full.
            SystemExit: a signal asked for a stop (code 75); a checkpoint is saved.
        """
        require(steps >= 1, f"steps must be 1 or more, not {steps!r}")
        self._steps, self._fits, self.should_stop = steps, self._fits + 1, False
        if self._source is None or self._source.batches is not batches:
            self._source = _Source(batches)
        saved = self._record.position
        if saved.get("fit") == self._fits:
            self._source.go_to(_of_this_process(saved["batches"]))
        if self.step >= steps:
            return self.state
        self._open()
        with self:
            self.train()
        self._record = self.record()
        return self.state

    def loop(self, signalled: StopRequest) -> None:
        """Take the steps of ``fit``."""
        assert self._source is not None
        for callback in self._callbacks:
            callback.on_train_begin(self)
        self.take_steps(self._source, signalled)

    def log_step(self, metrics: Metrics) -> None:
        """Count and log a step, and call the callbacks."""
        super().log_step(metrics)
        for callback in self._callbacks:
            callback.on_step_end(self)

    def save(self) -> bool:
        """Start to save a checkpoint, and call the callbacks; False if the last step was skipped.

        Raises:
            ConfigurationError: ``fit`` has not been called.
        """
        require(self._fits >= 0, "Trainer.save needs a fit, which opens the folder: call fit first")
        if not super().save():
            if self.step == self._steps:
                self.log.say(
                    f"step {self.step} was skipped, so no checkpoint of it is saved: the weights may be "
                    "broken. Give Trainer evaluate=: a finite validation_loss shows that they are not"
                )
            return False
        if self.checkpoints is not None:
            self._saved = self.step
            for callback in self._callbacks:
                callback.on_save(self)
        return True

    def evaluation(self) -> Metrics:
        """Dispatch an evaluation of the current weights.

        Raises:
            ConfigurationError: the trainer has nothing to evaluate on.
        """
        self.watchdog.phase(f"the evaluation after step {self.step}")
        if self._evaluate is None:
            raise ConfigurationError("there is nothing to evaluate on: give Trainer evaluate=")
        if callable(self._evaluate):
            return _as_validation(self._evaluate(self.state))
        return _as_validation(mean_metrics(self.state, self._evaluate))

    def position(self) -> dict[str, Any]:
        """The number of this call of ``fit``, and the position of each process in its batches."""
        assert self._source is not None
        every = gather_from_all(self._source.position())
        same = all(one == every[0] for one in every)
        return {"fit": self._fits, "batches": every[:1] if same else every}

    def finish(self) -> None:
        """Call the callbacks."""
        for callback in self._callbacks:
            callback.on_train_end(self)

    def close_inputs(self) -> None:
        """Close nothing, because the batches belong to the caller."""

    def note_end(self, error: BaseException) -> None:
        """Record nothing, because the caller gets the error."""

    def _open(self) -> None:
        """Open the services for one call of ``fit``; they close with the loop."""
        folder, record = self.folder, self._record
        if folder is not None:
            self.lock = RunLock(folder)
            if (warning := run_on_process_zero(self.lock.take)) is not None:
                warn(warning)
        try:
            self.log = self._make_log(steps=self._steps, start=self.step, skipped=record.skipped)
        except BaseException:
            if self.lock is not None:
                self.lock.close()
            raise
        self.clock = TrainingClock(record.seconds, minutes=self._save_minutes)
        if folder is not None:
            self.checkpoints = Checkpoints(
                folder.checkpoints, self._retention, start=self._saved, say=self.log.say
            )
            if self._peers is not None:
                self.watchdog = make_watchdog(ClusterSection(), folder, self._peers)

    def _tell(self, step: int, values: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            callback.on_log(self, step, values)


def _as_validation(values: Mapping[str, jax.Array | float]) -> Metrics:
    """The results of an evaluation with a prefix that no metric of a step has; "tokens" is dropped.

    Raises:
        ConfigurationError: two results would get the same name, or one is no scalar.
    """
    require(
        isinstance(values, Mapping),
        f"evaluate returned {type(values).__name__}: return scalars by name, such as {{'loss': loss}}",
    )
    named: Metrics = {}
    for name, value in values.items():
        require(
            isinstance(value, ArrayLike) and jnp.shape(value) == (),
            f"evaluate returned {name!r} as {short(value)}: return a scalar, such as its mean",
        )
        validation = name if name.startswith(_VALIDATION) else _VALIDATION + name
        require(
            validation not in named,
            f"evaluate returned {validation!r} and also {validation.removeprefix(_VALIDATION)!r}, which gets "
            "that prefix: rename one of them",
        )
        named[validation] = jnp.asarray(value)
    return {name: value for name, value in named.items() if name != f"{_VALIDATION}tokens"}


def _several(batches: Iterable[Any]) -> Iterable[Any]:
    """Refuse a single batch, whose keys would be taken for batches."""
    require(
        isinstance(batches, Iterable) and not isinstance(batches, Mapping),
        f"{type(batches).__name__} in place of batches: give a list, such as [batch], or an iterator",
    )
    return batches


class _Source(Iterator[Any]):
    """The batches of ``Trainer.fit``, with their position."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self._iterator = iter(_several(batches))
        self._taken = 0
        self.position()

    def __next__(self) -> Any:
        batch = next(self._iterator, self)
        if batch is self and self._iterator is not self.batches:
            self._iterator = iter(self.batches)
            batch = next(self._iterator, self)
        if batch is self:
            raise RunError(f"the batches ended after {self._taken}: give more of them, or fewer steps")
        self._taken += 1
        return batch

    def position(self) -> dict[str, Any]:
        if not (hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")):
            return {"taken": self._taken}
        state: Any = getattr(self._iterator, "get_state")()  # noqa: B009  (iterators have none, by their type)
        try:
            json.dumps(state)
        except (TypeError, ValueError):
            raise ConfigurationError(
                f"get_state() of the batches returns a {type(state).__name__}, which JSON cannot hold: "
                "return plain values, or pass a generator over the batches, which is read again on resuming"
            ) from None
        return {"state": state}

    def go_to(self, position: dict[str, Any]) -> None:
        if "state" in position:
            getattr(self._iterator, "set_state")(position["state"])  # noqa: B009  (likewise)
            return
        while self._taken < position["taken"]:
            next(self)


def _of_this_process(positions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """This process's position, from the positions in a checkpoint."""
    if len(positions) == 1:
        return positions[0]
    if len(positions) != jax.process_count():
        raise ConfigurationError(
            f"the checkpoint has the positions of {len(positions)} processes in their batches, and this job "
            f"has {jax.process_count()} processes: start as many, or pass batches whose order depends on the "
            "step alone"
        )
    return positions[jax.process_index()]
