"""The copy of a run in an object store, from which a start on other hosts continues.

Checkpoints are saved on disks first. A thread copies them while training continues::

    checkpoints/STEP/PART/   a checkpoint, or a host's part of it; manifest.json is written last
    files/                   other files of the run's folder
    files.json               their sizes and times

A checkpoint counts once all of its parts have their manifests. A start compares what it fetches with them.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import jax

from zerojax.errors import ConfigurationError, RunError
from zerojax.multihost.background import Worker
from zerojax.run.checkpoints import step_dirs
from zerojax.run.checkpoints.manifest import (
    MANIFEST,
    DamagedError,
    Manifest,
    Retention,
    parse_manifest,
    read_manifests,
    sizes_and_checksums,
)
from zerojax.run.checkpoints.parts import merge_parts, newest_save
from zerojax.run.object_store import ObjectStore, StoreError
from zerojax.run.run_dir import RunFolder, write_whole
from zerojax.validation.untrusted import dump_checked, load_checked

_FILES, _INDEX = "files/", "files.json"


class RunCopy:
    """A run's folder and its copy in an object store.

    All methods raise a StoreError if the store fails, and an OSError if the disk does.

    Attributes:
        url: of the copy (``zerojax.run.object_store``).
        folder: the run's folder.
        uploading: the step of the checkpoint whose files are being read, or None.
    """

    def __init__(self, url: str, folder: RunFolder) -> None:
        self.url, self.folder = url, folder
        self.uploading: int | None = None
        self._objects = ObjectStore(url)
        self._sent: dict[str, list[int]] | None = None

    @classmethod
    def of(cls, url: str, folder: RunFolder) -> "RunCopy | None":
        """The copy that the setting ``checkpoint.copy_to`` names; None if it is empty."""
        return cls(url, folder) if url else None

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints in the store, oldest first."""
        return sorted(step for step, there in self._manifests().items() if _complete(there))

    def fetch(self, step: int) -> list[str]:
        """Bring a checkpoint to the run's folder if it is not there, and the one with its frozen weights.

        Returns:
            A line for each fetched checkpoint.

        Raises:
            DamagedError: the store has other bytes than were saved.
            ConfigurationError: the store does not have the checkpoint.
        """
        path, draft = self._path(step), step_dirs.unfinished(self.folder.checkpoints, step)
        if path.exists():
            return []
        if not (parts := _complete(self._manifests().get(step, []))):
            raise ConfigurationError(f"{self.url} has no complete checkpoint of step {step}")
        shutil.rmtree(draft, ignore_errors=True)
        senders = {name: part for part in reversed(parts) for name in part.files}
        for part in parts:
            sizes = {name: size for name, (size, _) in part.files.items() if senders[name] is part}
            self._objects.download(draft, sizes, _prefix(part))
        found = sizes_and_checksums(draft, senders)
        if wrong := [name for name, part in senders.items() if found[name] != part.files[name]]:
            raise DamagedError(
                f"{self.url}/checkpoints/{step} is damaged: {wrong[0]} has changed. Delete it there"
            )
        if len(parts) > 1:
            merge_parts(draft, parts[0])
        else:
            write_whole(draft / MANIFEST, dump_checked(asdict(parts[0])))
        draft.rename(path)
        bases = [re.fullmatch(r"checkpoints/(\d+)", base) for base in parts[0].record.bases]
        others = [line for own in bases if own is not None for line in self.fetch(int(own[1]))]
        return [f"fetched checkpoint {step} from {self.url}", *others]

    def fetch_files(self) -> None:
        """Bring the other files to a run's folder that has no settings yet; these come last."""
        if self.folder.config.exists():
            return
        index = self._index()
        last = [name for name in index if name == self.folder.config.name]
        for names in ([name for name in index if name not in last], last):
            self._objects.download(self.folder.path, {name: index[name][0] for name in names}, _FILES)
            for name in names:
                os.utime(self.folder.path / name, ns=(index[name][1], index[name][1]))

    def push(self, retention: Retention, newest: int) -> None:
        """Upload what the store lacks, and delete the checkpoints that the retention drops.

        Each process uploads its part of a checkpoint. The first one does everything else. Checkpoints of
        later steps than ``newest`` belong to another run.
        """
        first, there = jax.process_index() == 0, self._manifests()
        saved = [one for one in read_manifests(self.folder.checkpoints) if one.step <= newest]
        dropped = retention.surplus(saved) if saved else []
        for manifest in reversed(saved):
            is_mine = manifest.step not in dropped and (first or manifest.parts > 1)
            if is_mine and not _has(there.get(manifest.step, []), manifest):
                self._upload(manifest)
        if first:
            self._delete_surplus(retention, newest)
            self._push_files()

    def delete(self, step: int) -> None:
        """Delete a checkpoint in the store, its manifests first."""
        own = f"checkpoints/{step}/"
        for name in self._objects.names(own):
            if name.endswith(f"/{MANIFEST}"):
                self._objects.delete(name)
        self._objects.delete(own)

    def _manifests(self) -> dict[int, list[Manifest]]:
        """The manifests in the store by step, ordered by part; an empty list for an unfinished upload."""
        found: dict[int, list[Manifest]] = {}
        for name in self._objects.names("checkpoints/"):
            if not (known := re.fullmatch(r"checkpoints/(\d+)/\d+/(.*)", name)):
                continue
            there = found.setdefault(int(known[1]), [])
            if known[2] == MANIFEST and (text := self._objects.read(name)) is not None:
                with suppress(DamagedError, UnicodeDecodeError):
                    there.append(parse_manifest(text.decode()))
        return {step: sorted(there, key=lambda one: one.part) for step, there in found.items()}

    def _upload(self, manifest: Manifest) -> None:
        path, prefix = self._path(manifest.step), _prefix(manifest)
        self.uploading = manifest.step
        try:
            self._objects.delete(f"{prefix}{MANIFEST}")
            self._objects.delete(prefix)
            self._objects.upload(path, {name: size for name, (size, _) in manifest.files.items()}, prefix)
            self._objects.write(f"{prefix}{MANIFEST}", dump_checked(asdict(manifest)).encode())
        except FileNotFoundError:
            if path.exists():  # otherwise the retention has removed it
                raise
        finally:
            self.uploading = None

    def _delete_surplus(self, retention: Retention, newest: int) -> None:
        there = {step: one for step, one in self._manifests().items() if step <= newest}
        if not (complete := [found[0] for step in sorted(there) if (found := _complete(there[step]))]):
            return
        kept = {one.step for one in complete}
        interrupted = [step for step in there if step < complete[-1].step and step not in kept]
        for step in [*retention.surplus(complete), *interrupted]:
            if not step_dirs.needed_by(self._path(step)):
                self.delete(step)

    def _push_files(self) -> None:
        if self._sent is None:
            self._sent = self._index()
        there = {
            str(path.relative_to(self.folder.path)): [path.stat().st_size, path.stat().st_mtime_ns]
            for path in self.folder.files()
        }
        changed = {name: stat[0] for name, stat in there.items() if self._sent.get(name) != stat}
        if changed:
            self._objects.upload(self.folder.path, changed, _FILES)
            self._objects.write(_INDEX, dump_checked(there).encode())
            self._sent = there

    def _index(self) -> dict[str, list[int]]:
        """The size and time of each file in the store, by name."""
        text = self._objects.read(_INDEX)
        try:
            return {} if text is None else load_checked(text.decode())
        except ValueError as error:
            raise StoreError(f"{self.url}/{_INDEX} is damaged: {error}") from error

    def _path(self, step: int) -> Path:
        return self.folder.checkpoints / str(step)


def check_copy(url: str) -> None:
    """Write an object below a URL, list it and delete it.

    Raises:
        ConfigurationError: the store refuses; names the reason.
        RunError: it cannot be reached, or fails.
    """
    name = f"probe-{secrets.token_hex(8)}"
    try:
        store = ObjectStore(url, patient=False)
        store.write(name, b"zerojax")
        store.names(name)
        store.delete(name)
    except StoreError as error:
        raise (RunError if error.may_pass else ConfigurationError)(
            f"checkpoint.copy_to: {error}. Check the bucket, and the keys and the server in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, or GOOGLE_APPLICATION_CREDENTIALS)"
        ) from None


def _prefix(manifest: Manifest) -> str:
    return f"checkpoints/{manifest.step}/{manifest.part}/"


def _complete(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The newest complete checkpoint among the manifests of a step: whole, or all of its parts."""
    save = [one for one in newest_save(manifests) if one is not None]
    return [one for one in save if one.parts == 1][:1] or save


def _has(there: Sequence[Manifest], manifest: Manifest) -> bool:
    """Whether the store has a checkpoint whole, or this part of it."""
    same = [one for one in there if one.saved_at == manifest.saved_at]
    own = manifest.part, manifest.parts
    return bool(_complete(same)) or any((one.part, one.parts) == own for one in same)


class Copier:
    """Keeps the copy of a run up to date, in a thread beside its training.

    Args:
        copy: the run and its copy.
        retention: which checkpoints the store keeps.
        say: prints a line from the thread if the store fails. The next save tries again.
    """

    def __init__(self, copy: RunCopy, retention: Retention, say: Callable[[str], object]) -> None:
        self.copy = copy
        self._retention, self._say = retention, say
        self._worker = Worker("copy", 2)  # one copies, and another waits, which copies all that is then there
        self._newest = -1
        self._error: str | None = None

    def start(self, newest: int) -> None:
        """Copy the checkpoints up to a step, soon."""
        self._newest = newest
        self._worker.put(self._push)

    def close(self) -> None:
        """Copy once more, and wait.

        Raises:
            RunError: the copy is not up to date; the run's folder is.
        """
        self._say = str  # no save follows, and the error says it
        if self._newest >= 0:
            self.start(self._newest)
        while not self._worker.wait(60.0):
            pass
        self._worker.close()
        if self._worker.error is not None:  # neither the store's nor the disk's
            raise self._worker.error
        if self._error is not None:
            raise RunError(f"{self._error}. The same command, given again, copies it")

    def _push(self) -> None:
        try:
            self.copy.push(self._retention, self._newest)
            self._error = None
        except (StoreError, OSError) as error:
            self._error = f"{self.copy.folder.path} is complete, but its copy is not: {error}"
            self._say(f"{self._error}. The next save tries again")
