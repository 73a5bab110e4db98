"""Two Hugging Face folders. At any time, one has a whole version of a job's weights."""

import json
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from .manifest import ITEMS, Manifest, Piece, Strip, Tensor
from .patches import (
    FULL,
    HEADER,
    UNSIGNED,
    Patch,
    PatchError,
    changed_checksums,
    checksums,
    decode,
    elements,
    full,
)

# Most bytes of tensors in a file of the mirror.
_FILE = 5 * 10**9

# In a complete folder: its session and version; and the manifest.
_STATE, _MANIFEST = "zerojax.json", "zerojax.manifest"


class Slot:
    """One of the two folders of a mirror: a Hugging Face model whose tensors can be changed in place."""

    def __init__(self, folder: Path, manifest: Manifest, *, create: bool = True) -> None:
        self.folder = folder
        self._tensors: dict[str, np.ndarray] = {}
        if create:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name, content in manifest.files.items():
                (folder / name).write_bytes(content)
            (folder / _MANIFEST).write_bytes(manifest.data)
        plan = _plan(manifest.tensors)
        for file, tensors in plan.items():
            self._open(folder / file, tensors, create)
        if create and len(plan) > 1:
            listed = {name: file for file, tensors in plan.items() for name, *_ in tensors}
            total = sum(tensor.nbytes for tensor in self._tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": listed}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        self.tensors = [self._tensors[name] for name, *_ in manifest.tensors]

    def _open(self, path: Path, tensors: list[Tensor], create: bool) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in tensors:
            start, end = end, end + _bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        if create:
            with path.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                file.flush()
                os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
        data = np.memmap(path, np.uint8, "r+", 8 + len(text), (end,)).view(np.ndarray)
        for name, dtype, _ in tensors:
            start, stop = header[name]["data_offsets"]
            self._tensors[name] = data[start:stop].view(UNSIGNED[ITEMS[dtype]])

    def read(self, piece: Piece) -> np.ndarray:
        """All elements of a piece as unsigned integers; 0 in its padding."""
        values = np.zeros(piece.size, UNSIGNED[piece.itemsize])
        for strip, own, block in piece.blocks(values):
            block[:] = strip.of(self.tensors[strip.tensor])[own]
        return values

    def write(self, piece: Piece, values: np.ndarray) -> None:
        """Write all elements of a piece. ``values`` are unsigned integers, padding included."""
        for strip, own, block in piece.blocks(values):
            strip.of(self.tensors[strip.tensor])[own] = block

    def read_at(self, points: list[tuple[Strip, np.ndarray, np.ndarray]], out: np.ndarray) -> np.ndarray:
        """Write the elements at ``Piece.points`` to ``out``, which is returned."""
        for strip, index, at in points:
            out[index] = self.tensors[strip.tensor][at]
        return out

    def write_at(self, points: list[tuple[Strip, np.ndarray, np.ndarray]], values: np.ndarray) -> None:
        """Set the elements at ``Piece.points`` to the ones of ``values``, which has one for each position."""
        for strip, index, at in points:
            self.tensors[strip.tensor][at] = values[index]

    def apply(self, piece: Piece, patch: Patch) -> None:
        """Apply a patch that was checked, and is not full."""
        places, differences = decode(patch, piece.size, piece.itemsize)
        points = piece.points(places)
        self.write_at(points, self.read_at(points, np.empty_like(differences)) + differences)


def _bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * ITEMS[dtype]


def _plan(tensors: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """The tensors of each file."""
    files: list[list[Tensor]] = [[]]
    used = 0
    for tensor in tensors:
        if files[-1] and used + _bytes(*tensor[1:]) > _FILE:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += _bytes(*tensor[1:])
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": own for i, own in enumerate(files, 1)}


class Log:
    """The patches of the last versions, for receivers that missed some. Full patches are not kept.

    Args:
        most: bytes of patches.
    """

    def __init__(self, most: int = 1 << 30) -> None:
        self._most, self._used = most, 0
        self._steps: deque[dict[int, list[Patch]]] = deque()

    def add(self, patches: dict[int, list[Patch]]) -> None:
        """Add a version: patches by their piece's number. Drop the oldest versions that exceed the limit."""
        step = {p: own for p, own in patches.items() if all(patch.before != FULL for patch in own)}
        self._steps.append(step)
        self._used += _size(step)
        while self._used > self._most:
            self._used -= _size(self._steps.popleft())

    def chain(self, piece: int, before: int, version: int) -> list[Patch] | None:
        """The patches of a piece from one version to another; None if some are missing."""
        found: list[Patch] = []
        for step in list(self._steps):
            for patch in step.get(piece, ()):
                if patch.before == before and before < version:
                    found.append(patch)
                    before = patch.version
        return found if before == version else None


def _size(step: dict[int, list[Patch]]) -> int:
    return sum(len(patch.body) + HEADER.size for own in step.values() for patch in own)


class Update(NamedTuple):
    """A version of the weights that has just become visible.

    Attributes:
        version: its number.
        folder: of the model. Nothing is written there until the next version's callbacks have returned.
    """

    version: int
    folder: Path


class Source(Protocol):
    """Where a ``Feed`` gets the weights: the process that trains, or the mirror of a relay."""

    session: str

    def description(self) -> tuple[str, bytes, list[int]]:
        """The session, its manifest, and the numbers of this source's pieces."""
        ...

    def wait_newer(self, version: int, seconds: float) -> int:
        """Wait until the newest version is above ``version``, at most ``seconds``.

        Returns the newest version.
        """
        ...

    def patches(self, piece: int, before: int) -> list[Patch]:
        """The patches that bring a piece from version ``before`` to the newest, or one full patch."""
        ...


class Replica:
    """The weights of an engine, and the versions of their pieces.

    Subclasses store patches, and make a version visible once all its pieces are there.

    Attributes:
        session: the name of the training job's session.
        version: the one that the engine serves; ``FULL`` if it is not of this session.
        manifest: of this session.
    """

    session: str = ""
    version: int = FULL
    manifest: Manifest | None = None

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Pieces that threads write now; threads that read the visible weights; whether a version becomes
        # visible now; the session to which everything else belongs.
        self._writing: set[int] = set()
        self._reading, self._committing, self._started = 0, False, ""

    def _start(self, session: str, manifest: Manifest, version: int) -> None:
        self.session = self._started = session
        self.manifest, self.version = manifest, version
        # For each piece the version that is stored, and its checksums, if known.
        self._newest = [version] * len(manifest.pieces)
        self._count = Counter(self._newest)
        self._sums: list[tuple[int, int] | None] = [None] * len(manifest.pieces)

    def begin(self, session: str, manifest: Manifest) -> None:
        """Receive from a training job, which is newer than the one before, or the same.

        Raises:
            PatchError: the job is older, or has another manifest than before.
        """
        with self._changed:
            if session > self.session:
                self.session = session  # from now on, patches of the old session are refused
                self._changed.wait_for(lambda: not (self._writing or self._reading or self._committing))
                try:
                    if session == self.session:
                        self._start(session, manifest, FULL)
                except BaseException:
                    self.session = self._started
                    raise
                finally:
                    self._changed.notify_all()
            self._changed.wait_for(lambda: self._started == self.session)
            self._check(session)
            if self.manifest is None or manifest.digest != self.manifest.digest:
                raise PatchError("the manifest does not belong to this session")

    def _check(self, session: str) -> None:
        if session != self.session:
            raise PatchError(f"session {session[:40]} is over: {self.session} was started since")

    def versions(self, pieces: Sequence[int]) -> list[int]:
        """The newest versions of pieces; ``FULL`` if a piece must be sent in full."""
        with self._changed:
            return [self._newest[piece] for piece in pieces]

    def apply(self, session: str, patch: Patch) -> None:
        """Check and store a patch; serve its version if it is the last patch of it.

        Raises:
            PatchError: it does not fit. Nothing has changed.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._committing)
            self._check(session)
            assert self.manifest is not None
            if patch.piece >= len(self.manifest.pieces) or patch.piece in self._writing:
                raise PatchError(f"there is no piece {patch.piece}, or another connection writes it now")
            newest = self._newest[patch.piece]
            if patch.version <= newest:
                raise PatchError(
                    f"piece {patch.piece} is at version {newest}: {patch.version} was sent before"
                )
            if patch.before not in (FULL, newest):
                raise PatchError(f"piece {patch.piece} is at version {newest}, not {patch.before}")
            self._writing.add(patch.piece)
        last = False
        try:
            self._write(patch, self.manifest.pieces[patch.piece])
            with self._changed:
                self._move(patch.piece, patch.version)
        finally:
            with self._changed:
                self._writing.discard(patch.piece)
                if not self._writing and patch.version > self.version:
                    last = self._committing = self._count[patch.version] == len(self._newest)
                self._changed.notify_all()
        if last:
            try:
                self._serve(patch.version)
            finally:
                with self._changed:
                    self._committing = False
                    self._changed.notify_all()

    def _move(self, piece: int, version: int) -> None:
        self._count[self._newest[piece]] -= 1
        self._count[version] += 1
        self._newest[piece] = version

    def _compare(self, patch: Patch, sums: tuple[int, int]) -> None:
        if sums != patch.sums:
            with self._changed:
                self._move(patch.piece, FULL)
            raise PatchError(f"piece {patch.piece} would not have the sender's checksums: send it in full")

    def wait_newer(self, version: int, seconds: float) -> int:
        """As ``Source``."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > version, seconds)
            return self.version

    def _write(self, patch: Patch, piece: Piece) -> None:
        """Check a patch and store it, where the engine does not see it."""
        raise NotImplementedError

    def _serve(self, version: int) -> None:
        """Let the engine see a version. All of its pieces are stored."""
        raise NotImplementedError


class Mirror(Replica):
    """Two folders of the same model: one is complete and visible, and the other receives the next version.

    ``FOLDER/current`` is a link to the visible one. The visible folder never changes.

    Args:
        folder: for the two folders; best in memory (/dev/shm), since a version changes most of its pages.
        callbacks: called with each new version. No other version arrives before they return.
    """

    def __init__(self, folder: Path, callbacks: Sequence[Callable[[Update], None]] = ()) -> None:
        super().__init__()
        self._folder, self._callbacks = folder, callbacks
        self._visible: Slot | None = None
        self._hidden: Slot | None = None
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "current"
        if (link / _STATE).is_file():  # complete, of an earlier process
            state = json.loads((link / _STATE).read_text())
            manifest = Manifest((link / _MANIFEST).read_bytes())
            visible = self._visible = Slot(link.resolve(), manifest, create=False)
            self._start(state["session"], manifest, state["version"])
            self._hidden = self._caught_up(manifest, visible, None, {})

    def _start(self, session: str, manifest: Manifest, version: int) -> None:
        old = self.manifest
        if old is not None and self._callbacks and old.codes != manifest.codes:
            raise PatchError(
                f"this job sends {manifest.codes or 'full'} weights, but the engine was started with "
                f"{old.codes or 'full'} ones and would misread them. Stop the engine and its receiver, "
                f"delete {self._folder}, and start both again"
            )
        super()._start(session, manifest, version)
        self._hidden = None
        self._since: dict[int, list[Patch]] = {}  # since the visible version
        self._log = Log()

    def _new_slot(self, manifest: Manifest) -> Slot:
        visible = self._visible.folder.name if self._visible is not None else ""
        return Slot(self._folder / ("b" if visible == "a" else "a"), manifest)

    def _write(self, patch: Patch, piece: Piece) -> None:
        """Check a patch, then write it to the hidden folder."""
        number = patch.piece
        with self._changed:
            if self._hidden is None:
                assert self.manifest is not None
                self._hidden = self._new_slot(self.manifest)
            hidden = self._hidden
            (hidden.folder / _STATE).unlink(missing_ok=True)
        if patch.before == FULL:
            values = elements(patch, piece.size, piece.itemsize)
            self._compare(patch, checksums(values))
            hidden.write(piece, values)
            self._since[number] = [replace(patch, body=b"")]
        else:
            places, differences = decode(patch, piece.size, piece.itemsize)
            points = piece.points(places)
            old = hidden.read_at(points, np.empty_like(differences))
            new = old + differences
            sums = self._sums[number] or checksums(hidden.read(piece))
            self._compare(patch, changed_checksums(sums, places, old, new))
            hidden.write_at(points, new)
            self._since.setdefault(number, []).append(patch)
        self._sums[number] = patch.sums

    def _serve(self, version: int) -> None:
        """Make the hidden folder visible, call the callbacks, and bring the other folder to the version."""
        hidden, manifest = self._hidden, self.manifest
        assert hidden is not None
        assert manifest is not None
        with self._changed:
            self._changed.wait_for(lambda: not self._reading)
        state = json.dumps({"session": self.session, "version": version})
        _replace(hidden.folder / _STATE, lambda path: path.write_text(state))
        _replace(self._folder / "current", lambda path: path.symlink_to(hidden.folder.name))
        with self._changed:
            # A folder of an earlier session may have other tensors.
            other = self._visible if self.version != FULL else None
            self._visible, self.version = hidden, version
            patches, self._since = self._since, {}
            self._log.add(patches)
            self._changed.notify_all()
        try:
            for callback in self._callbacks:
                callback(Update(version, hidden.folder))
        finally:
            self._hidden = self._caught_up(manifest, hidden, other, patches)

    def _caught_up(
        self, manifest: Manifest, visible: Slot, other: Slot | None, patches: dict[int, list[Patch]]
    ) -> Slot:
        """The other folder with the visible version: patched, or copied where patches are full."""
        hidden = self._new_slot(manifest) if other is None else other
        (hidden.folder / _STATE).unlink(missing_ok=True)

        def bring(number: int) -> None:
            piece, own = manifest.pieces[number], patches.get(number, [])
            if other is None or any(patch.before == FULL for patch in own):
                hidden.write(piece, visible.read(piece))
            else:
                for patch in own:
                    hidden.apply(piece, patch)

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(bring, range(len(manifest.pieces))))
        return hidden

    def description(self) -> tuple[str, bytes, list[int]]:
        """As ``Source``, for a relay."""
        with self._changed:
            self._changed.wait_for(lambda: self._started == self.session and self.manifest is not None)
            assert self.manifest is not None
            return self.session, self.manifest.data, list(range(len(self.manifest.pieces)))

    def patches(self, piece: int, before: int) -> list[Patch]:
        """As ``Source``."""
        with self._changed:
            if (found := self._log.chain(piece, before, self.version)) is not None:
                return found
            self._changed.wait_for(lambda: not self._committing)
            manifest, visible, version = self.manifest, self._visible, self.version
            assert manifest is not None
            assert visible is not None
            self._reading += 1
        try:
            return [full(visible.read(manifest.pieces[piece]), piece, version)]
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file or link so that it is there whole or not at all."""
    draft = path.with_name(path.name + ".new")
    draft.unlink(missing_ok=True)
    write(draft)
    os.replace(draft, path)
