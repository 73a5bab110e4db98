"""A run's folder: what lies where, and whether a command may go on with it.

```
RUN/config.toml      the settings, complete; `zerojax train RUN/config.toml` repeats the run
RUN/run.json         what became of it: status, steps, final losses, versions
RUN/lock             which process writes here, or was the last to
RUN/data/            tokens and tokenizer
RUN/huggingface/     config.json and other files of the model that was imported, to be written back
RUN/tokenizer/       its tokenizer
RUN/checkpoints/     one folder a step
RUN/metrics.jsonl    one JSON object a step
RUN/tensorboard/     the same, as events
RUN/loss.png         the loss curve
RUN/wandb/           what Weights & Biases keeps here
RUN/profile/         traces of steps, by `--profile`
RUN/stacks/          one file a process, where the run got stuck
```
"""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zerojax.errors import ZeroError
from zerojax.run.config import ConfigError, RunConfig, config_to_dict, dump_config, load_config

Resume = Literal["auto", "must", "never"]

# What a checkpoint's arrays and position mean; other settings may change when a run goes on.
_FIXED_SECTIONS = ("model", "data")
_FIXED_KEYS = ("optimizer.name", "train.seed", "train.batch_size", "train.sequence_length")
_FREE_KEYS = {"data.verify", "model.attention", "model.loss_chunk", "model.dropout"}


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run.

    Attributes:
        path: the folder; everything that a run writes lies in it.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The settings."""
        return self.path / "config.toml"

    @property
    def summary(self) -> Path:
        """What became of the run."""
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        """Which process writes here, or was the last to; see `zerojax.run.run_lock`."""
        return self.path / "lock"

    @property
    def data(self) -> Path:
        """Tokens and tokenizer."""
        return self.path / "data"

    @property
    def huggingface(self) -> Path:
        """Files of the model that was imported, but for its weights."""
        return self.path / "huggingface"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the model that was imported."""
        return self.path / "tokenizer" / "tokenizer.json"

    @property
    def checkpoints(self) -> Path:
        """One folder a step."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def curve(self) -> Path:
        """The loss curve."""
        return self.path / "loss.png"

    @property
    def profile(self) -> Path:
        """Traces of steps."""
        return self.path / "profile"

    @property
    def stacks(self) -> Path:
        """What every thread of every process was doing when the run got stuck."""
        return self.path / "stacks"

    def create(self) -> None:
        """Make the folder.

        Raises:
            ZeroError: it cannot be made or written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ZeroError(f"{self.path}: cannot make the run folder: {error.strerror}") from error
        for folder in (self.path, self.checkpoints):
            try:
                if folder.exists():
                    tempfile.TemporaryFile(dir=folder).close()
            except OSError as error:
                raise ZeroError(f"{folder}: the run cannot write here: {error.strerror}") from error

    def read_config(self) -> RunConfig:
        """The settings of the run.

        Raises:
            ConfigError: there is no run here.
        """
        if not self.config.is_file():
            raise ConfigError(f"{self.path} is not a run folder: it has no {self.config.name}")
        return load_config(self.config)

    def write_config(self, config: RunConfig) -> None:
        """Store the settings."""
        write_whole(self.config, dump_config(config))

    def update_summary(self, **values: Any) -> None:
        """Add to what is known of the run."""
        noted = {"noted": time.time()}
        write_whole(self.summary, json.dumps(self.read_summary() | values | noted, indent=1) + "\n")

    def begin_session(self, step: int, **facts: Any) -> None:
        """Note that a process has begun, or goes on, to train this run.

        Args:
            step: from which.
            **facts: of JSON, such as `devices`.
        """
        before = sessions(self.read_summary())
        if before and before[-1]["status"] == "running":
            before[-1] |= {"status": "killed", "ended": None, "last_step": None}
        began = {"began": time.time(), "step": step, **facts}
        self.update_summary(sessions=[*before, began], status="running", reason=None, step=None)

    def read_summary(self) -> dict[str, Any]:
        """What is known of the run; empty where nothing is, or the file is damaged: nothing goes by it."""
        try:
            values = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, dict) else {}


def sessions(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The starts of a run, oldest first, each with its end; of the last that of the run itself.

    Args:
        summary: as `RunFolder.read_summary` gives it.

    Returns:
        Dicts of "began" and "ended" (Unix time), "step" and "last_step", "status", "reason", and the
        facts that `RunFolder.begin_session` was given; None for what was not noted.
    """
    found = summary.get("sessions", [])
    known = [dict(one) for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    if known:
        names = {"status": "status", "reason": "reason", "last_step": "step", "ended": "noted"}
        known[-1] |= {name: summary.get(key) for name, key in names.items()}
    return known


def check_start(latest: int | None, resume: Resume, folder: RunFolder) -> None:
    """Refuse a start that is not what was asked for.

    Args:
        latest: the step of the newest checkpoint, or None.
        resume: "auto" goes on where it can, "must" refuses to start afresh, "never" to go on.
        folder: the run's.

    Raises:
        ZeroError: the wish cannot be met; nothing is ever overwritten instead.
    """
    if resume == "must" and latest is None:
        raise ZeroError(f"--resume must: there is no checkpoint in {folder.checkpoints}")
    if resume == "never" and latest is not None:
        raise ZeroError(
            f"--resume never: {folder.path} holds a run at step {latest}; choose another --run-dir, "
            "or delete that folder yourself"
        )


def check_same_run(before: RunConfig, now: RunConfig, folder: RunFolder) -> list[str]:
    """What has changed in the settings of a run that goes on.

    Args:
        before: the settings that it was saved with.
        now: those that it shall go on with.
        folder: the run's, for the message.

    Returns:
        A line for each change, such as "train.steps: 100 -> 200".

    Raises:
        ZeroError: a change that makes it another run (model, data, batch, seed, optimizer).
    """
    changes = _changes(before, now)
    for name, (old, new) in changes.items():
        section = name.partition(".")[0]
        if name not in _FREE_KEYS and (section in _FIXED_SECTIONS or name in _FIXED_KEYS):
            raise ZeroError(
                f"{folder.path} was begun with {name} = {old!r} and cannot go on with {new!r}: "
                "choose another --run-dir"
            )
    return [f"{name}: {old} -> {new}" for name, (old, new) in changes.items()]


def check_same_model(before: RunConfig, now: RunConfig, folder: RunFolder) -> None:
    """Refuse settings that are not of the model whose weights were imported.

    Args:
        before: the settings that they were imported with.
        now: those of the run that begins with them.
        folder: the run's, for the message.

    Raises:
        ZeroError: a change of the model.
    """
    for name, (old, new) in _changes(before, now).items():
        if name.startswith("model.") and name not in _FREE_KEYS:
            raise ZeroError(
                f"{folder.path} holds an imported model with {name} = {old!r}, which cannot be {new!r}"
            )


def _changes(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Name -> values before and now, of each setting that differs."""
    return {
        f"{section}.{key}": (values.get(key), new.get(key))
        for section, new in config_to_dict(now).items()
        for values in [config_to_dict(before)[section]]
        for key in sorted({*values, *new})
        if values.get(key) != new.get(key)
    }


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that no reader ever sees half of it."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
