"""The manifest of a checkpoint: its files, with checksums, and the trainer's record.

``STEP/manifest.json`` lists every other file with its size and CRC-32, which detects accidents but not
tampering. The first process writes it when all processes have written all their files, before the checkpoint
gets its final name.
"""

import errno
import math
import os
import zlib
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dacite

from zerojax.errors import ConfigurationError, RunError
from zerojax.run.checkpoints import step_dirs
from zerojax.run.run_dir import write_whole
from zerojax.validation.bounds import is_time, require
from zerojax.validation.spelling import suggests
from zerojax.validation.untrusted import dump_checked, load_checked

MANIFEST = "manifest.json"
_OLD_NAME = "seal.json"  # of zerojax 0.1.0
_FORMAT = 1
_CHUNK_BYTES = 1 << 22
# Reading and checksumming release the GIL, and a file system serves several readers faster than one.
_THREADS = min(8, os.cpu_count() or 1)


# The file is gone, or the disk cannot read it. Other errors say nothing about the file: a lack of permission,
# or a server that does not respond.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO)


class DamagedError(ConfigurationError):
    """A checkpoint differs from what was saved; the message says how."""


def _unreadable(path: Path, error: OSError) -> DamagedError | RunError:
    """The error to raise for a file of a checkpoint that could not be read."""
    why = f"{error.filename or path}: {error.strerror or error}"
    if error.errno in _DAMAGE:
        return DamagedError(why)
    return RunError(f"checkpoint {path} cannot be read, and may be intact: {why}")


@dataclass(frozen=True)
class Beside:
    """The record of a further state in a checkpoint.

    Attributes:
        config: as in ``Record``, with the state's own model.
        base: as in ``Record``, for the state's frozen weights.
    """

    config: dict[str, Any]
    base: str = ""


@dataclass(frozen=True)
class Record:
    """The trainer's record, saved with the arrays.

    Attributes:
        config: the run's settings, as ``spelled_out`` returns them; a custom loop has [zero] alone.
        position: the position in the training batches.
        skipped: steps without an update so far.
        seconds: seconds of training so far, over all starts of the run, by a monotonic clock.
        mesh: (nodes, devices per node) of the job that wrote it.
        metrics: the step's metrics, such as "validation_loss"; may be empty.
        base: the checkpoint or Hugging Face folder that holds the run's frozen weights or its reference.
            Relative to the run's folder if it is inside. Empty if the run has neither, or draws its frozen
            weights from its seed.
        beside: the records of further states by name, such as a critic.
    """

    config: dict[str, Any] = field(default_factory=dict)
    position: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    seconds: float = 0.0
    mesh: tuple[int, int] = (0, 0)
    metrics: dict[str, float] = field(default_factory=dict)
    base: str = ""
    beside: dict[str, Beside] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(is_time(self.seconds), f"seconds = {self.seconds:.3g} is not a time")

    @property
    def bases(self) -> set[str]:
        """Every ``base`` of the record: the run cannot continue without them."""
        return {self.base, *(one.base for one in self.beside.values())}


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents.

    Attributes:
        step: optimizer steps done.
        saved_at: Unix time; informational only.
        record: the trainer's record.
        files: relative path -> (bytes, CRC-32).
        format: version of this layout.
        part: with several ``parts``, the number of the one that this host has, from 0.
        parts: the number of hosts that each have a part of the checkpoint; 1 if it is whole.
    """

    step: int
    saved_at: float
    record: Record
    files: dict[str, tuple[int, int]]
    format: int = _FORMAT
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        require(is_time(self.saved_at), f"saved_at = {self.saved_at:.3g} is not a time")

    @property
    def size(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(size for size, _ in self.files.values())


def write_manifest(
    path: Path, step: int, saved_at: float, record: Record, *, part: int = 0, parts: int = 1
) -> Manifest:
    """Read all files of a complete checkpoint, or of a host's part of it, and write its manifest.

    Raises:
        OSError: a file cannot be read, or the manifest cannot be written.
    """
    files = sizes_and_checksums(path, sorted(files_of(path)))
    manifest = Manifest(step, saved_at, record, files, part=part, parts=parts)
    # It must be on the disk before the folder gets its final name, like Orbax's arrays.
    write_whole(path / MANIFEST, dump_checked(asdict(manifest)))
    return manifest


def read_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint; the other files are not checked.

    Raises:
        DamagedError: the manifest is missing or damaged.
        RunError: it cannot be read for another reason.
    """
    try:
        return parse_manifest((path / _manifest_name(path)).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise DamagedError(f"{MANIFEST} is damaged: {error}") from error


def read_manifests(folder: Path) -> list[Manifest]:
    """The manifests that can be read of all checkpoints, oldest first; other files are not checked."""
    found = []
    for step in step_dirs.steps(folder):
        # A damaged one is reported when a run wants to resume from it.
        with suppress(DamagedError, RunError):
            found.append(read_manifest(folder / str(step)))
    return found


def parse_manifest(text: str) -> Manifest:
    """The manifest in a text of ``dump_checked``.

    Raises:
        DamagedError: the text is damaged.
    """
    try:
        hooks = dacite.Config(strict=True, cast=[tuple])
        manifest = dacite.from_dict(Manifest, load_checked(text), hooks)
    except (ValueError, TypeError, RecursionError, dacite.DaciteError) as error:
        raise DamagedError(f"{MANIFEST} is damaged: {error}") from error
    if manifest.format != _FORMAT:
        raise DamagedError(f"{MANIFEST} is of format {manifest.format}, and this version reads {_FORMAT}")
    return manifest


def _manifest_name(path: Path) -> str:
    return _OLD_NAME if (path / _OLD_NAME).exists() and not (path / MANIFEST).exists() else MANIFEST


def verify(path: Path, step: int | None = None, *, checksums: bool = True, is_part: bool = False) -> Manifest:
    """Compare a checkpoint with its manifest.

    Args:
        path: the checkpoint's folder.
        step: the step that the manifest must have, if given.
        checksums: read every byte; otherwise compare names and sizes only.
        is_part: accept a host's part of a checkpoint. It may hold files of other parts as well.

    Raises:
        DamagedError: names the first file that is missing, unknown, too short, too long or changed; or the
            checkpoint is a part.
        RunError: a file cannot be read for another reason.
    """
    manifest = read_manifest(path)
    if step not in (None, manifest.step):
        raise DamagedError(f"{MANIFEST} belongs to step {manifest.step}")
    if manifest.parts > 1 and not is_part:
        raise DamagedError(
            f"this host has only part {manifest.part + 1} of {manifest.parts}. All hosts get all parts when "
            "the run resumes or ends"
        )
    try:
        found = {name: (path / name).stat().st_size for name in files_of(path)}
        if problems := _differences(manifest, found):
            raise DamagedError(_summary(problems))
        if checksums:
            read = sizes_and_checksums(path, manifest.files)
            problems = [
                f"{name} has changed (wrong checksum)" for name in read if read[name] != manifest.files[name]
            ]
            if problems:
                raise DamagedError(_summary(problems))
    except OSError as error:
        raise _unreadable(path, error) from error
    return manifest


def _differences(manifest: Manifest, found: dict[str, int]) -> list[str]:
    missing = [f"{name} is missing" for name in manifest.files if name not in found]
    others = (name for name in found if name not in manifest.files and manifest.parts == 1)
    unknown = [f"{name} does not belong to it" for name in others]
    sizes = [
        f"{name} has {found[name]} bytes, not {size}"
        for name, (size, _) in manifest.files.items()
        if name in found and found[name] != size
    ]
    return missing + sizes + unknown


def _summary(problems: list[str]) -> str:
    return problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")


def files_of(path: Path) -> Iterator[str]:
    """Relative names of all files in a checkpoint except the manifest.

    Raises:
        DamagedError: there is a link, or something else that is no plain file.
    """
    manifest = _manifest_name(path)
    for folder, folders, names in os.walk(path, onerror=_raise):
        for name in [*folders, *names]:
            entry = Path(folder, name)
            if entry.is_symlink() or not (entry.is_dir() or entry.is_file()):
                raise DamagedError(f"{entry.relative_to(path)} is not a plain file")
        yield from (
            str(relative)
            for name in names
            if str(relative := Path(folder, name).relative_to(path)) != manifest
        )


def _raise(error: OSError) -> None:
    raise error


def sizes_and_checksums(path: Path, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """The size and CRC-32 of files in a folder, by name."""

    def read(name: str) -> tuple[int, int]:
        size = crc = 0
        with (path / name).open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        return size, crc

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


@suggests
@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the newest two, and the ones that any of these rules keeps.

    Two, because the newest may hold broken weights, which only the next step shows. Saving it proved that the
    weights before it were good. Checkpoints that hold a run's frozen weights or its reference are kept as
    well.

    Orbax's own policies measure time by the wall clock, and know nothing of frozen weights.

    Attributes:
        newest: keep this many of the newest, at least two; None keeps all.
        every: keep checkpoints at multiples of this many steps; 0 for none.
        best: keep this many with the lowest validation loss, among checkpoints saved at a step that measured
            it.
        minutes: keep checkpoints from the last ``minutes`` of training; time between runs does not count.
    """

    newest: int | None = None
    every: int = 0
    best: int = 0
    minutes: float = 0.0

    def surplus(self, manifests: Sequence[Manifest]) -> list[int]:
        """The steps of the checkpoints that no rule keeps.

        Args:
            manifests: the checkpoints' manifests, oldest first; at least one.
        """
        if self.newest is None:
            return []
        steps = [manifest.step for manifest in manifests]
        newest = manifests[-1].record
        kept = {*steps[-max(2, self.newest) :], *_lowest(manifests, self.best)}
        kept |= {step for step in steps if f"checkpoints/{step}" in newest.bases}
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        if self.minutes:
            since = newest.seconds - self.minutes * 60
            kept |= {manifest.step for manifest in manifests if manifest.record.seconds > since}
        return [step for step in steps if step not in kept]


def _lowest(manifests: Sequence[Manifest], count: int) -> list[int]:
    """The steps with the lowest validation loss; among equal losses the newest."""
    losses = [(m.record.metrics.get("validation_loss", math.nan), -m.step) for m in manifests]
    return [-step for _, step in sorted(found for found in losses if math.isfinite(found[0]))[:count]]
