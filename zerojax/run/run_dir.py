"""A run's folder: its layout, its lock, and checks of whether a run may resume in it.

```
RUN/config.toml      the settings, complete; ``zerojax train RUN/config.toml`` repeats the run
RUN/run.json         its outcome: status, steps, final losses, versions
RUN/lock             names the process that writes here, or the last one that did
RUN/data/            tokens and tokenizer; or the tokenizer and the origin of tokens prepared elsewhere
RUN/huggingface/     config.json and other files of an imported model, for its export
RUN/tokenizer/       its tokenizer
RUN/checkpoints/     one folder per step
RUN/metrics.jsonl    one JSON object per step
RUN/tensorboard/     the same values as TensorBoard events
RUN/samples.jsonl    completions of ``zerojax posttrain`` with their rewards, or of ``train.eval_samples``
RUN/loss.png         the loss curve
RUN/wandb/           files of Weights & Biases
RUN/profile/         traces of steps, with ``--profile``
RUN/stacks/          the stacks of each process of a hung run
```
"""

import errno
import fcntl
import json
import os
import platform
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Self, TextIO

from zerojax.errors import ConfigurationError, file_errors
from zerojax.log import logger
from zerojax.run.config import ConfigError, RunConfig, dump_config, load_config, spelled_out
from zerojax.run.recovery import Recovery
from zerojax.validation.paths import check_checkpoint_path

Resume = Literal["auto", "must", "never"]

# Settings that give a checkpoint's arrays and position their meaning; others may change when a run resumes.
_FIXED_SECTIONS = ("model", "data", "lora", "posttrain")
_FIXED_KEYS = (
    "optimizer.name",
    "train.seed",
    "train.batch_size",
    "train.sequence_length",
    "zero.frozen",
    "zero.frozen_weights",
)
_FREE_KEYS = {
    *("data.verify", "model.attention", "model.loss_chunk", "model.token_tile", "model.dropout"),
    *("posttrain.reward_workers", "posttrain.reward_seconds", "posttrain.reward_variables"),
    *("posttrain.eval_prompts", "posttrain.samples"),
}

# The thread that watches the other processes writes run.json, too.
_SUMMARY = threading.Lock()

# Error numbers of flock on file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunFolder:
    """The paths of one run; the module's docstring says what is at each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.summary = path / "run.json"
        self.lock = path / "lock"
        self.data = path / "data"
        self.huggingface = path / "huggingface"
        self.tokenizer = path / "tokenizer" / "tokenizer.json"
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.curve = path / "loss.png"
        self.profile = path / "profile"
        self.stacks = path / "stacks"

    def files(self) -> list[Path]:
        """The files that a start on another host, evaluation and export need beside the checkpoints."""
        alone = (self.config, self.summary, self.metrics, self.samples, self.curve)
        folders = (self.data, self.huggingface, self.tokenizer.parent)
        inside = (path for folder in folders for path in sorted(folder.rglob("*")))
        return [path for path in (*alone, *inside) if path.is_file()]

    def check(self) -> None:
        """Refuse a path that cannot be a run's folder; writes nothing."""
        check_checkpoint_path(self.path)
        with file_errors(self.path, what="cannot create the run folder: "):
            places = (self.path, *self.path.absolute().parents)
            there = next(place for place in places if place.exists() or place.is_symlink())
        if not there.is_dir():
            found = "a file" if there.exists() else "a link to nothing"
            raise ConfigurationError(
                f"{self.path}: cannot create the run folder: {there} is {found}: choose another --run-dir"
            )

    def create(self) -> None:
        """Create the folder."""
        self.check()
        with file_errors(self.path, what="cannot create the run folder: "):
            self.path.mkdir(parents=True, exist_ok=True)
        for folder in (self.path, self.checkpoints):
            with file_errors(folder, what="the run cannot write here: "):
                if folder.exists() or folder.is_symlink():  # a link may lead to a disk that is not mounted
                    tempfile.TemporaryFile(dir=folder).close()

    def check_config(self) -> None:
        """Refuse to begin a run where its config.toml would replace one that no run has written."""
        if not self.config.exists() or self.summary.exists() or self.checkpoints.exists():
            return
        with suppress(ConfigurationError, UnicodeError):
            if self.config.read_text(encoding="utf-8") == dump_config(load_config(self.config)):
                return
        raise ConfigurationError(
            f"{self.config}: the run would replace this file by its complete settings, without comments: "
            "move it, or choose another --run-dir"
        )

    def read_config(self) -> RunConfig:
        """The settings of the run.

        Raises ConfigurationError if the folder holds no run, or its settings are invalid.
        """
        check_checkpoint_path(self.path)
        if not self.config.is_file():
            raise ConfigError(
                f"{self.path} is not a run folder: it has no {self.config.name}. Name the folder of a run"
            )
        return self.here(load_config(self.config))

    def here(self, config: RunConfig) -> RunConfig:
        """The settings with the run's own tokenizer at its new path, if the run's folder was moved."""
        named = Path(config.data.tokenizer)
        if named.parts[-2:] != self.tokenizer.parts[-2:] or named.exists() or not self.tokenizer.is_file():
            return config
        return replace(config, data=replace(config.data, tokenizer=str(self.tokenizer.absolute())))

    def write_config(self, config: RunConfig) -> None:
        """Store the settings."""
        write_whole(self.config, dump_config(config))

    def update_summary(self, **values: Any) -> None:
        """Add values to run.json; "noted" is then the time of a new "status"."""
        noted = {"noted": time.time()} if "status" in values else {}
        with _SUMMARY:
            write_whole(self.summary, json.dumps(self.read_summary() | values | noted, indent=1) + "\n")

    def begin_session(self, step: int, **more: Any) -> None:
        """Record that training begins or resumes after ``step`` steps, and ``more`` (JSON values)."""
        before = sessions(self.read_summary())
        if before and before[-1]["status"] == "running":
            before[-1] |= {"status": "killed", "ended": None, "last_step": None}
        began = {"began": time.time(), "step": step, **more}
        self.update_summary(sessions=[*before, began], status="running", reason=None, step=None)

    def note_recovery(self, recovery: Recovery) -> None:
        """Record in the newest session how long the restart took that began it."""
        *before, now = sessions(self.read_summary()) or [{}]
        notes = [*now.get("notes", ()), str(recovery)]
        self.update_summary(sessions=[*before, now | {"notes": notes, "recovery": recovery.seconds}])

    def read_summary(self) -> dict[str, Any]:
        """The values in run.json, empty if it is missing or damaged; informational only."""
        try:
            values = json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return values if isinstance(values, dict) else {}


def sessions(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The starts of a run and how they ended, oldest first, from the run's summary.

    Returns:
        Dicts of "began" and "ended" (Unix time), "step" and "last_step", "status", "reason", and the values
        passed to ``RunFolder.begin_session``. Values that were not recorded are None.
    """
    found = summary.get("sessions", [])
    known = [dict(one) for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    if known:
        names = {"status": "status", "reason": "reason", "last_step": "step", "ended": "noted"}
        known[-1] |= {name: summary.get(key) for name, key in names.items()}
    return known


def check_start(latest: int | None, resume: Resume, folder: RunFolder) -> None:
    """Refuse a start or resumption that was not requested. ``latest`` is the step of the newest checkpoint.

    "auto" resumes if possible, "must" refuses a new run, and "never" refuses to resume.
    """
    if resume == "must" and latest is None:
        raise ConfigurationError(f"--resume must: there is no checkpoint in {folder.checkpoints}")
    if resume == "never" and latest is not None:
        raise ConfigurationError(
            f"--resume never: {folder.path} holds a run at step {latest}; choose another --run-dir, "
            "or delete that folder yourself"
        )


def check_same_run(before: RunConfig, now: RunConfig, folder: RunFolder) -> list[str]:
    """The changes in the settings of a run that resumes, a line for each: "train.steps: 100 -> 200".

    Refuses a change that makes it another run: of model, data, batch, seed or optimizer.
    """
    changes = _changes(before, now)
    for name, (old, new) in changes.items():
        section = name.partition(".")[0]
        if name not in _FREE_KEYS and (section in _FIXED_SECTIONS or name in _FIXED_KEYS):
            theirs = name.startswith("model.") or name == "data.tokenizer"
            repeat = " A run started with --init-from has it from there: repeat the option." * theirs
            raise ConfigurationError(
                f"{folder.path} was started with {name} = {old!r} and cannot resume with {new!r}: "
                f"set it back, as in {folder.config}, or choose another --run-dir.{repeat}"
            )
    return [f"{name}: {old} -> {new}" for name, (old, new) in changes.items()]


def sharding_changes(before: RunConfig, now: RunConfig) -> list[str]:
    """The lines of ``check_same_run`` about the options of [zero]."""
    changes = _changes(before, now).items()
    return [f"{name}: {old} -> {new}" for name, (old, new) in changes if name.startswith("zero.")]


def check_same_model(before: RunConfig, now: RunConfig, folder: RunFolder) -> None:
    """Refuse settings that describe another model than the imported one in the run's folder."""
    # A reward model gets a new head.
    head = {"model.outputs", "model.tied"} if now.model.outputs is not None else set()
    for name, (old, new) in _changes(before, now).items():
        if name.startswith("model.") and name not in _FREE_KEYS | head:
            raise ConfigurationError(
                f"{folder.path} holds an imported model with {name} = {old!r}, which cannot become {new!r}: "
                "set it back"
            )


def _changes(before: RunConfig, now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Name -> (value saved, value now) of each setting that differs, with the options of presets."""
    saved = spelled_out(before)
    return {
        f"{section}.{key}": (old.get(key), new.get(key))
        for section, new in spelled_out(now).items()
        for old in [saved[section]]
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    }


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy the files of a folder that exist."""
    for name in names:
        if (source / name).is_file():
            (target / name).write_bytes((source / name).read_bytes())


def write_whole(path: Path, text: str) -> None:
    """Write a small file.

    After a crash of the process or machine it has its old or its new text, never a part.
    """
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


class RunLock:
    """The lock of a run's folder, held by process zero of a job; a context manager.

    It is a lock of the operating system (flock), which is released however its process ends. The file's
    content is for people. It excludes other processes of the same host. It excludes processes of other hosts
    if the shared file system supports locks. NFS does unless mounted with ``nolock`` or ``local_lock``, and
    Lustre unless with ``noflock`` or ``localflock``.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._file: TextIO | None = None

    def take(self) -> str | None:
        """Create the folder and lock it.

        Returns:
            None, or a warning if the file system has no locks.
        """
        self._folder.create()
        path, note = self._folder.lock, None
        with file_errors(path, what="the run cannot write here: "):
            file = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with file:
                raise ConfigurationError(
                    f"{self._folder.path} is in use by {_holder(file)}: wait for it, end it, or choose "
                    "another folder"
                ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                file.close()
                raise
            note = f"{path}: this file system has no locks: let no second run use the folder"
        file.truncate(0)
        own = {"host": platform.node(), "pid": os.getpid(), "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}"}
        file.write(json.dumps(own | {"command": shlex.join(sys.argv)}))
        file.flush()
        self._file = file
        return note

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        if (line := self.take()) is not None:
            logger.warning(line)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _holder(file: TextIO) -> str:
    """The process that holds a lock, as it has described itself in the lock's file."""
    file.seek(0)
    try:
        found = json.loads(file.read())
        line = f"process {found['pid']} on {found['host']} since {found['since']} ({found['command']})"
        return "".join(x if x.isprintable() else "?" for x in line)
    except (ValueError, TypeError, KeyError, RecursionError):
        return "another process"
