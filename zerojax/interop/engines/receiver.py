"""Receives a training job's weights beside an inference engine. Needs Python 3.10 and NumPy, nothing else.

The weights arrive as patches of pieces, which docs/engines.md specifies. This file may be copied, so that it
can run in the engine's environment, without zerojax and JAX:

    python receiver.py --listen 10.0.0.7:7000 --mirror /dev/shm/model

It keeps a Hugging Face folder at the job's weights. Each version is written beside the one that the engine
reads, and becomes visible at once.
"""

import argparse
import base64
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import shutil
import socket
import struct
import sys
import threading
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# Header of a patch: piece, version before, version, two checksums, changed elements, escaped elements, low
# bits of a gap, bits of a value.
_HEADER = struct.Struct("<IqqIIIIBBxx")

TOKEN = "ZEROJAX_JOB_TOKEN"
"""The environment variable with the job's secret."""

FULL = -1
"""The version before a patch that has all elements of a piece."""

_UNSIGNED = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


class PatchError(ValueError):
    """A patch or a message does not fit; nothing was changed."""


@dataclass(frozen=True)
class Patch:
    """A change of one piece of the weights.

    Attributes:
        piece: its number in the manifest.
        before: the version that the patch changes; ``FULL`` if it has all elements.
        version: the version after it.
        sums: the checksums of the piece after it.
        count: changed elements.
        escaped: changed elements whose values are in the section of escaped values.
        low: bits of a gap in the section of low bits.
        bits: bits of a value.
        body: the sections one after another, or all elements.
    """

    piece: int
    before: int
    version: int
    sums: tuple[int, int]
    count: int = 0
    escaped: int = 0
    low: int = 0
    bits: int = 1
    body: bytes = field(default=b"", repr=False)

    def to_bytes(self) -> bytes:
        """Header and body."""
        numbers = self.count, self.escaped, self.low, self.bits
        return _HEADER.pack(self.piece, self.before, self.version, *self.sums, *numbers) + self.body

    @staticmethod
    def of(data: bytes) -> "Patch":
        """Undo ``to_bytes``.

        Raises:
            PatchError: the header is incomplete.
        """
        if len(data) < _HEADER.size:
            raise PatchError(f"a patch of {len(data)} bytes has no header: it was cut off")
        piece, before, version, one, other, count, escaped, low, bits = _HEADER.unpack_from(data)
        body = bytes(data[_HEADER.size :])
        return Patch(piece, before, version, (one, other), count, escaped, low, bits, body)


def full(new: np.ndarray, piece: int, version: int) -> Patch:
    """The patch with all elements ``new`` of a piece: a vector of unsigned integers, padding included."""
    return Patch(piece, FULL, version, checksums(new), body=new.tobytes())


def decode(patch: Patch, size: int, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """The positions of a patch that is not full, ascending, and the differences to add there.

    Args:
        patch: the patch.
        size: elements of the piece.
        itemsize: bytes of an element.

    Returns:
        int64 positions, and differences as unsigned integers, which are added modulo the elements' range.

    Raises:
        PatchError: the body is cut off, or a position is outside the piece.
    """
    dtype, count = _UNSIGNED[itemsize], patch.count
    if count > size or patch.escaped > count or patch.low > 32 or not 1 <= patch.bits <= 8 * itemsize:
        raise PatchError(f"the header of a patch for piece {patch.piece} is invalid")
    if not count:
        return np.zeros(0, np.int64), np.zeros(0, dtype)
    words = np.frombuffer(patch.body, "<u4", len(patch.body) // 4)
    widths = (count, patch.low), (count, patch.bits), (patch.escaped, 8 * itemsize)
    ends = np.cumsum([0, *(-(-number * width // 32) for number, width in widths)])
    unary = np.unpackbits(words[ends[-1] :].view(np.uint8), bitorder="little")
    stops = np.flatnonzero(unary)
    if len(stops) != count:
        raise PatchError(f"a patch for piece {patch.piece} has {len(stops)} of {count} positions")
    low, values, escaped = (
        _numbers(words[start:stop], *one)
        for start, stop, one in zip(ends[:-1], ends[1:], widths, strict=True)
    )
    places = np.cumsum(((np.diff(stops, prepend=-1) - 1) << patch.low) + low + 1) - 1
    if places[-1] >= size:
        raise PatchError(f"a patch for piece {patch.piece} changes element {places[-1]} of {size}")
    escapes = values == (1 << patch.bits) - 1
    if escapes.sum() != patch.escaped:
        raise PatchError(f"a patch for piece {patch.piece} has a wrong number of escaped values")
    codes = (values + 1).astype(dtype)
    codes[escapes] = escaped
    return places, (codes >> 1) ^ (0 - (codes & 1)).astype(dtype)


def _numbers(words: np.ndarray, count: int, width: int) -> np.ndarray:
    """Numbers of ``width`` bits one behind the other, the lowest bit first, as int64."""
    if not width:
        return np.zeros(count, np.int64)
    if width in (8, 16, 32):
        return words.view(f"<u{width // 8}")[:count].astype(np.int64)
    start = np.arange(count, dtype=np.int64) * width
    pairs = np.append(words, np.uint32(0)).astype(np.uint64)
    pairs = pairs[:-1] | pairs[1:] << np.uint64(32)
    numbers = pairs[start >> 5] >> (start & 31).astype(np.uint64) & np.uint64((1 << width) - 1)
    return numbers.astype(np.int64)


def keys(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors of a piece's first ``count`` 32-bit words in its two checksums: odd, uint32[count] each."""
    if count > len(_keys[0]):
        number = np.arange(max(count, 1 << 16), dtype=np.uint32)
        _keys[:] = [_mixed(number), _mixed(~number)]
    return _keys[0][:count], _keys[1][:count]


_keys = [np.zeros(0, np.uint32)] * 2


def _mixed(x: np.ndarray) -> np.ndarray:
    x = x * np.uint32(0x9E3779B1)
    x = (x ^ x >> 15) * np.uint32(0x85EBCA77)
    return (x ^ x >> 13) | np.uint32(1)


def checksums(values: np.ndarray) -> tuple[int, int]:
    """The two checksums, modulo 2^32, of a piece's elements: a vector of unsigned integers."""
    data = values.tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4")
    one, other = (int(np.dot(words, key)) for key in keys(len(words)))
    return one, other


def changed_checksums(
    sums: tuple[int, int], places: np.ndarray, old: np.ndarray, new: np.ndarray
) -> tuple[int, int]:
    """The checksums after the elements at ``places`` changed from ``old`` to ``new``; all have one length."""
    each = 4 // new.itemsize
    shift = (places % each * (8 * new.itemsize)).astype(np.uint32)
    difference = (new.astype(np.uint32) - old.astype(np.uint32)) << shift
    words = places // each
    top = int(words[-1]) + 1 if len(words) else 0
    (one, other), (key, other_key) = sums, keys(top)
    added = (int(np.dot(difference, x[words])) for x in (key, other_key))
    return (one + next(added)) % 2**32, (other + next(added)) % 2**32


# Bytes of an element of the dtypes of safetensors files.
_ITEMS = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}

# Most bytes of tensors in a file of the mirror.
_FILE = 5 * 10**9

# In a complete folder: its session and version; and the manifest.
_STATE, _MANIFEST = "zerojax.json", "zerojax.manifest"

Tensor = tuple[str, str, tuple[int, ...]]
"""A tensor's name, dtype ("BF16") and shape."""


@dataclass(frozen=True)
class Strip:
    """A rectangle of a parameter's matrix, and where it is in a tensor.

    The element at (row, column) is at ``offset + (row - top) * down + (column - left) * right`` of the flat
    tensor.
    """

    tensor: int
    top: int
    bottom: int
    left: int
    end: int
    offset: int
    down: int
    right: int

    @property
    def last(self) -> int:
        """The position of its last element in the flat tensor."""
        return (
            self.offset + (self.bottom - self.top - 1) * self.down + (self.end - self.left - 1) * self.right
        )

    def of(self, flat: np.ndarray) -> np.ndarray:
        """The rectangle as a view [rows, columns] of the flat tensor."""
        shape = self.bottom - self.top, self.end - self.left
        strides = self.down * flat.itemsize, self.right * flat.itemsize
        return np.lib.stride_tricks.as_strided(flat[self.offset :], shape, strides)


@dataclass(frozen=True)
class Piece:
    """A piece of the weights.

    Attributes:
        size: its elements, padding included.
        itemsize: bytes of an element.
        width: columns of the parameter's matrix.
        runs: for each range without padding its first place in the piece, and its first and last element
            (exclusive) in the matrix.
        strips: the rectangles of the matrix in the tensors.
    """

    size: int
    itemsize: int
    width: int
    runs: tuple[tuple[int, int, int], ...]
    strips: tuple[Strip, ...]

    def points(self, places: np.ndarray) -> list[tuple[Strip, np.ndarray, np.ndarray]]:
        """Where elements are in tensors.

        Args:
            places: positions in the piece, ascending.

        Returns:
            For each strip the indices of its positions, and their positions in the flat tensor.
        """
        found: list[tuple[Strip, np.ndarray, np.ndarray]] = []
        for place, first, last in self.runs:
            start, stop = np.searchsorted(places, (place, place + last - first))
            rows, columns = np.divmod(places[start:stop] + (first - place), self.width)
            for strip in self.strips:
                one, end = np.searchsorted(rows, (strip.top, strip.bottom))
                index, row, column = np.arange(start + one, start + end), rows[one:end], columns[one:end]
                if (strip.left, strip.end) != (0, self.width):
                    kept = (column >= strip.left) & (column < strip.end)
                    index, row, column = index[kept], row[kept], column[kept]
                at = (row - strip.top) * strip.down + (column - strip.left) * strip.right + strip.offset
                if len(index):
                    found.append((strip, index, at))
        return found

    def blocks(self, values: np.ndarray) -> Iterator[tuple[Strip, tuple[slice, slice], np.ndarray]]:
        """All elements of a piece as rectangles: (strip, its rows and columns, view of ``values``)."""
        for place, first, last in self.runs:
            for top, bottom, left, end in _rectangles(first, last, self.width):
                start = place - first + top * self.width + left
                block = values[start : start + (bottom - top) * (end - left)].reshape(
                    bottom - top, end - left
                )
                for strip in self.strips:
                    rows = max(top, strip.top), min(bottom, strip.bottom)
                    columns = max(left, strip.left), min(end, strip.end)
                    if rows[0] < rows[1] and columns[0] < columns[1]:
                        own = _from(rows, strip.top), _from(columns, strip.left)
                        yield strip, own, block[_from(rows, top), _from(columns, left)]


def _from(span: tuple[int, int], origin: int) -> slice:
    return slice(span[0] - origin, span[1] - origin)


def _rectangles(first: int, last: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """The elements [first, last) of a matrix as rectangles: a partial row, whole rows, a partial row."""
    while first < last:
        row, left = divmod(first, width)
        whole = (last - first) // width if left == 0 else 0
        end = width if whole else min(width, left + last - first)
        yield row, row + max(whole, 1), left, end
        first += max(whole, 1) * (end - left)


class Manifest:
    """The tensors of a model, and the pieces in which they arrive.

    Args:
        data: JSON, as docs/engines.md describes it.
    """

    def __init__(self, data: bytes) -> None:
        self.data, self.digest = data, hashlib.sha256(data).hexdigest()
        values = json.loads(data)
        self.files = {name: base64.b64decode(text) for name, text in values["files"].items()}
        if bad := [name for name in self.files if Path(name).name != name or name.startswith(".")]:
            raise PatchError(f"the manifest has a file {bad[0]!r}, which is no plain name")
        self.tensors: list[Tensor] = [(name, dtype, tuple(shape)) for name, dtype, shape in values["tensors"]]
        matrices = [(width, tuple(Strip(*strip) for strip in strips)) for width, strips in values["matrices"]]
        for strip in (strip for _, strips in matrices for strip in strips):
            shape = self.tensors[strip.tensor][2]
            if not 0 <= strip.offset <= strip.last < max(1, int(np.prod(shape, dtype=np.int64))):
                raise PatchError(f"{strip} in the manifest is outside its tensor of shape {shape}")
        self.pieces: list[Piece] = []
        for matrix, size, runs in values["pieces"]:
            width, strips = matrices[matrix]
            itemsize = _ITEMS[self.tensors[strips[0].tensor][1]]
            self.pieces.append(Piece(size, itemsize, width, tuple(map(tuple, runs)), strips))


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
            self._tensors[name] = data[start:stop].view(_UNSIGNED[_ITEMS[dtype]])

    def read(self, piece: Piece) -> np.ndarray:
        """All elements of a piece as unsigned integers; 0 in its padding."""
        values = np.zeros(piece.size, _UNSIGNED[piece.itemsize])
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
    return int(np.prod(shape, dtype=np.int64)) * _ITEMS[dtype]


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
        """Add the patches of each piece to a new version."""
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
    return sum(len(patch.body) + _HEADER.size for own in step.values() for patch in own)


class Update:
    """A version of the weights that has just become visible.

    Attributes:
        version: its number.
        folder: of the model. Nothing is written there until the next version's callbacks have returned.
    """

    def __init__(self, version: int, manifest: Manifest, slot: Slot, patches: dict[int, list[Patch]]) -> None:
        self.version, self.folder = version, slot.folder
        self._manifest, self._slot, self._patches = manifest, slot, patches

    def changes(self) -> Iterator[tuple[str, np.ndarray | None, np.ndarray]]:
        """The changes since the last version, for an engine that holds the tensors itself.

        Yields:
            A tensor's name; positions in the flat tensor, or None; the values there as unsigned integers with
            the elements' bits, or the whole flat tensor. A tensor is returned several times if several pieces
            have changed it, and whole if one of them was sent in full.
        """
        manifest, tensors = self._manifest, self._slot.tensors
        whole: set[int] = set()
        for number, patches in self._patches.items():
            if any(patch.before == FULL for patch in patches):
                whole |= {strip.tensor for strip in manifest.pieces[number].strips}
        for tensor in sorted(whole):
            yield manifest.tensors[tensor][0], None, tensors[tensor]
        for number, patches in self._patches.items():
            piece = manifest.pieces[number]
            for patch in patches if any(strip.tensor not in whole for strip in piece.strips) else ():
                for strip, _, at in piece.points(decode(patch, piece.size, piece.itemsize)[0]):
                    if strip.tensor not in whole:
                        yield manifest.tensors[strip.tensor][0], at, tensors[strip.tensor][at]


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


class Mirror:
    """Two folders of the same model: one is complete and visible, and the other receives the next version.

    ``FOLDER/current`` is a link to the visible one. A version becomes visible once all its pieces are there.

    Args:
        folder: for the two folders; best in memory (/dev/shm), since a version changes most of its pages.
        callbacks: called with each new version. No other version arrives before they return.

    Attributes:
        session: the training job's.
        version: of the visible folder; ``FULL`` if it is not of this session.
        manifest: of this session.
    """

    session: str = ""
    version: int = FULL
    manifest: Manifest | None = None

    def __init__(self, folder: Path, callbacks: Sequence[Callable[[Update], None]] = ()) -> None:
        self._folder, self._callbacks = folder, callbacks
        self._changed = threading.Condition()
        self._visible: Slot | None = None
        self._hidden: Slot | None = None
        # Pieces that threads write now; readers of the visible folder; whether a version becomes visible now;
        # the session to which everything else belongs.
        self._writing: set[int] = set()
        self._reading, self._committing, self._started = 0, False, ""
        folder.mkdir(parents=True, exist_ok=True)
        link = folder / "current"
        if (link / _STATE).is_file():  # complete, of an earlier process
            state = json.loads((link / _STATE).read_text())
            manifest = Manifest((link / _MANIFEST).read_bytes())
            visible = self._visible = Slot(link.resolve(), manifest, create=False)
            self._start(state["session"], manifest, state["version"])
            self._hidden = self._caught_up(manifest, visible, None, {})

    def _start(self, session: str, manifest: Manifest, version: int) -> None:
        self.session = self._started = session
        self.manifest, self.version = manifest, version
        self._hidden = None
        count = len(manifest.pieces)
        # For each piece the version in the hidden folder, and its checksums, if known.
        self._newest = [version] * count
        self._count = Counter(self._newest)
        self._sums: list[tuple[int, int] | None] = [None] * count
        self._since: dict[int, list[Patch]] = {}  # since the visible version
        self._log = Log()

    def begin(self, session: str, manifest: Manifest) -> None:
        """Receive from a training job, which is newer than the one before, or the same.

        Raises:
            PatchError: the job is older, or has another manifest than before.
        """
        with self._changed:
            if session > self.session:
                self.session = session  # from now on, patches of the old session are refused
                self._changed.wait_for(lambda: not (self._writing or self._reading or self._committing))
                if session == self.session:
                    self._start(session, manifest, FULL)
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._started == self.session)
            self._check(session)
            if self.manifest is None or manifest.digest != self.manifest.digest:
                raise PatchError("the manifest is not the one of this session")

    def _check(self, session: str) -> None:
        if session != self.session:
            raise PatchError(f"session {session[:40]} is over: {self.session} has begun since")

    def versions(self, pieces: Sequence[int]) -> list[int]:
        """The newest versions of pieces; ``FULL`` if a piece must be sent in full."""
        with self._changed:
            return [self._newest[piece] for piece in pieces]

    def apply(self, session: str, patch: Patch) -> None:
        """Apply a patch to the hidden folder; make the version visible if it is the last patch of it.

        Raises:
            PatchError: it does not fit. Nothing has changed, and the visible folder never does.
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
            if self._hidden is None:
                self._hidden = self._new_slot(self.manifest)
            (self._hidden.folder / _STATE).unlink(missing_ok=True)
        last = False
        try:
            self._write(patch, self.manifest.pieces[patch.piece], self._hidden)
            with self._changed:
                self._move(patch.piece, patch.version)
        finally:
            with self._changed:
                self._writing.discard(patch.piece)
                if not self._writing and patch.version > self.version:
                    last = self._committing = self._count[patch.version] == len(self._newest)
                self._changed.notify_all()
        if last:
            self._commit(patch.version)

    def _move(self, piece: int, version: int) -> None:
        self._count[self._newest[piece]] -= 1
        self._count[version] += 1
        self._newest[piece] = version

    def _new_slot(self, manifest: Manifest) -> Slot:
        visible = self._visible.folder.name if self._visible is not None else ""
        return Slot(self._folder / ("b" if visible == "a" else "a"), manifest)

    def _write(self, patch: Patch, piece: Piece, hidden: Slot) -> None:
        """Check a patch, then write it to the hidden folder."""
        number = patch.piece
        if patch.before == FULL:
            if len(patch.body) != piece.size * piece.itemsize:
                raise PatchError(f"a full patch for piece {number} has the wrong size, {len(patch.body)}")
            values = np.frombuffer(patch.body, _UNSIGNED[piece.itemsize])
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

    def _compare(self, patch: Patch, sums: tuple[int, int]) -> None:
        if sums != patch.sums:
            with self._changed:
                self._move(patch.piece, FULL)
            raise PatchError(f"piece {patch.piece} would not have the sender's checksums: send it in full")

    def _commit(self, version: int) -> None:
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
                callback(Update(version, manifest, hidden, patches))
        finally:
            self._hidden = self._caught_up(manifest, hidden, other, patches)
            with self._changed:
                self._committing = False
                self._changed.notify_all()

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

    def wait_newer(self, version: int, seconds: float) -> int:
        """As ``Source``."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > version, seconds)
            return self.version

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


# Seconds for a connection to prove that it knows the token, and for which it may then be silent.
_PATIENCE, _SILENT = 10.0, 120.0

# Most connections that have not proved it yet, and most bytes of a frame.
_PENDING, _LARGEST = 64, 1 << 28

_FRAME = struct.Struct("<IB")
_MESSAGE, _PATCH, _BLOB = 1, 2, 3
_TAG = hashlib.sha256().digest_size


class Channel:
    """An authenticated connection: frames that nobody else can make, change, repeat or leave out.

    Both sides prove by HMAC-SHA256 of two random challenges that they know the job's token, which is never
    sent. Each frame has an HMAC of its number and content. Contents are not encrypted.
    """

    def __init__(self, sock: socket.socket, key: bytes, roles: tuple[bytes, bytes]) -> None:
        self._socket = sock
        sock.settimeout(_SILENT)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._keys = [hmac.digest(key, role, "sha256") for role in roles]
        self._sent = self._received = 0

    @staticmethod
    def connect(host: str, port: int, token: str) -> "Channel":
        """Connect to a receiver.

        Raises:
            OSError: it cannot be reached, or one of the two does not know the token.
        """
        sock = socket.create_connection((host, port), _PATIENCE)
        try:
            theirs, ours = _read(sock, 32), secrets.token_bytes(32)
            sock.sendall(ours + _proof(token, b"sender", theirs, ours))
            if not hmac.compare_digest(_read(sock, _TAG), _proof(token, b"receiver", theirs, ours)):
                raise ConnectionError(f"{host}:{port} does not know the job's token")
            return Channel(sock, _proof(token, b"key", theirs, ours), (b"sender", b"receiver"))
        except BaseException:
            sock.close()
            raise

    @staticmethod
    def accept(sock: socket.socket, token: str) -> "Channel":
        """Admit a sender; errors as ``connect``."""
        sock.settimeout(_PATIENCE)
        ours = secrets.token_bytes(32)
        sock.sendall(ours)
        theirs, proof = _read(sock, 32), _read(sock, _TAG)
        if not hmac.compare_digest(proof, _proof(token, b"sender", ours, theirs)):
            raise ConnectionError("a connection does not know the job's token")
        sock.sendall(_proof(token, b"receiver", ours, theirs))
        return Channel(sock, _proof(token, b"key", ours, theirs), (b"receiver", b"sender"))

    def send(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self._send(_MESSAGE, json.dumps(message).encode())

    def send_patch(self, patch: Patch) -> None:
        """Send a patch."""
        self._send(_PATCH, patch.to_bytes())

    def send_blob(self, data: bytes) -> None:
        """Send bytes."""
        self._send(_BLOB, data)

    def _send(self, kind: int, data: bytes) -> None:
        tag = _tag(self._keys[0], self._sent, kind, data)
        self._sent += 1
        self._socket.sendall(_FRAME.pack(len(data), kind) + tag)
        self._socket.sendall(data)

    def receive(self) -> dict[str, Any] | Patch | bytes:
        """The next message, patch or bytes.

        Raises:
            OSError: the connection has ended or was silent too long, or the frame is not the sender's next.
        """
        size, kind = _FRAME.unpack(_read(self._socket, _FRAME.size))
        if size > _LARGEST:
            raise ConnectionError(f"a frame of {size} bytes is too large")
        tag, data = _read(self._socket, _TAG), _read(self._socket, size)
        if not hmac.compare_digest(tag, _tag(self._keys[1], self._received, kind, data)):
            raise ConnectionError("a frame was changed, repeated or left out on its way")
        self._received += 1
        if kind == _MESSAGE:
            return json.loads(data)
        return Patch.of(data) if kind == _PATCH else data

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message, and return the response. Errors as ``response``."""
        self.send(message)
        return self.response()

    def response(self) -> dict[str, Any]:
        """The receiver's next message.

        Raises:
            OSError: as for ``receive``, or something else arrived.
            PatchError: the receiver refused something; its reason.
        """
        response = self.receive()
        if not isinstance(response, dict):
            raise ConnectionError("the receiver sent no message")
        if "refused" in response:
            raise PatchError(str(response["refused"])[:500])
        return response

    def close(self, reason: str = "") -> None:
        """Close the connection.

        A receiver that refuses something gives its ``reason``, which the sender prints.
        """
        with suppress(OSError):
            if reason:
                self.send({"refused": reason})
                # Unread data would reset the connection, and the reason would be lost.
                self._socket.shutdown(socket.SHUT_WR)
                self._socket.settimeout(1.0)
                while self._socket.recv(1 << 20):
                    pass
        self._socket.close()


def _proof(token: str, role: bytes, receiver: bytes, sender: bytes) -> bytes:
    return hmac.digest(token.encode(), b"zerojax weights " + role + receiver + sender, "sha256")


def _tag(key: bytes, number: int, kind: int, data: bytes) -> bytes:
    return hmac.digest(key, struct.pack("<QB", number, kind) + data, "sha256")


def _read(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = sock.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]
    return bytes(data)


class Receiver:
    """Listens for a job's processes, and applies to a mirror what they send.

    Args:
        mirror: the mirror.
        host: the interface.
        port: 0 for any free one.
        token: the job's secret. It may be empty only on a loopback interface.

    Attributes:
        port: the port.

    Raises:
        ValueError: there is no token, and other hosts could connect.
    """

    def __init__(self, mirror: Mirror, host: str, port: int, token: str) -> None:
        if not token and not _is_loopback(host):
            raise ValueError(f"{host} can be reached by others: give the job's token in {TOKEN}")
        self._mirror, self._token = mirror, token
        self._listening = socket.create_server((host, port), family=_family(host), backlog=256)
        self.port: int = self._listening.getsockname()[1]
        self._pending = threading.Semaphore(_PENDING)
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Stop listening, and end all connections."""
        for sock in (self._listening, *list(self._open)):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            self._pending.acquire()
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return  # closed
            self._open.add(sock)
            threading.Thread(target=self._handle, args=(sock,), daemon=True).start()

    def _handle(self, sock: socket.socket) -> None:
        try:
            try:
                channel = Channel.accept(sock, self._token)
            finally:
                self._pending.release()
            try:
                self._serve(channel)
            except (PatchError, KeyError, TypeError, IndexError) as error:
                print(f"refused: {error}", file=sys.stderr, flush=True)
                channel.close(reason=str(error) or "an invalid message")
        except (ConnectionError, TimeoutError):
            pass  # a stranger, or the other side has ended: it connects again
        except OSError as error:
            if sock.fileno() >= 0:  # not closed here
                print(f"{error}: is the mirror's disk full?", file=sys.stderr, flush=True)
        finally:
            self._open.discard(sock)
            sock.close()

    def _serve(self, channel: Channel) -> None:
        mirror, hello = self._mirror, channel.response()
        session, pieces = hello["session"], hello["pieces"]
        manifest = mirror.manifest
        if manifest is None or manifest.digest != hello["manifest"]:
            channel.send({"needs": "manifest"})
            data = channel.receive()
            if not isinstance(data, bytes):
                raise PatchError("a manifest was expected")
            manifest = Manifest(data)
        mirror.begin(session, manifest)
        channel.send({"versions": mirror.versions(pieces)})
        while True:
            received = channel.receive()
            if isinstance(received, Patch):
                mirror.apply(session, received)
            elif isinstance(received, dict):
                channel.send({"serving": mirror.wait_newer(received["end"] - 1, 0.2)})


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Feed:
    """Keeps one receiver at the newest version of a source, over several TCP flows.

    It connects again when a connection ends, and continues where the receiver is.

    Args:
        source: the weights.
        address: HOST:PORT of the receiver.
        token: the job's secret.
        flows: connections, which share the source's pieces.

    Attributes:
        address: as given.
        error: why a flow is not connected; None if all are.
    """

    def __init__(self, source: Source, address: str, token: str, flows: int = 4) -> None:
        self.address, self._source, self._token = address, source, token
        self._errors: list[BaseException | None] = [None] * flows
        self._serving = [FULL] * flows
        self._closed = threading.Event()
        for index in range(flows):
            threading.Thread(target=self._run, args=(index,), daemon=True).start()

    @property
    def error(self) -> BaseException | None:
        """Why a flow is not connected."""
        return next((error for error in self._errors if error is not None), None)

    @property
    def serving(self) -> int:
        """The version that the receiver's engine serves, as far as this process knows."""
        return max(self._serving)

    def close(self) -> None:
        """End the flows once their current messages are sent."""
        self._closed.set()

    def _run(self, index: int) -> None:
        pause = 0.1
        while not self._closed.is_set():
            try:
                if self._source.wait_newer(FULL, 0.5) > FULL:
                    self._connect(index)
                    pause = 0.1
            except (OSError, ValueError, KeyError) as error:
                self._errors[index] = error
                self._closed.wait(pause)
                pause = min(2 * pause, 1.0)

    def _connect(self, index: int) -> None:
        session, manifest, pieces = self._source.description()
        share = pieces[index :: len(self._errors)]
        host, _, port = self.address.rpartition(":")
        channel = Channel.connect(host.strip("[]"), int(port), self._token)
        try:
            digest = hashlib.sha256(manifest).hexdigest()
            response = channel.ask({"session": session, "manifest": digest, "pieces": share})
            if "needs" in response:
                channel.send_blob(manifest)
                response = channel.response()
            self._errors[index] = None
            self._keep_up(index, channel, session, dict(zip(share, response["versions"], strict=True)))
        finally:
            channel.close()

    def _keep_up(self, index: int, channel: Channel, session: str, versions: dict[int, int]) -> None:
        done = FULL
        while not self._closed.is_set() and self._source.session == session:
            newest = self._source.wait_newer(done, 0.0 if self._serving[index] < done else 0.2)
            if newest > done:
                try:
                    for piece in versions:
                        for patch in self._source.patches(piece, versions[piece]):
                            channel.send_patch(patch)
                            versions[piece] = patch.version
                except OSError:
                    channel.response()  # raises the receiver's reason, if there is one
                    raise
                done = min(versions.values(), default=newest)
            self._serving[index] = channel.ask({"end": done})["serving"]


class Post:
    """Tells an engine about each version by an HTTP request.

    Args:
        url: of the request. vLLM's server has /collective_rpc if VLLM_SERVER_DEV_MODE=1.
        body: JSON, in which {folder} and {version} are replaced.
        seconds: for the response.
    """

    RELOAD = '{"method": "reload_weights", "kwargs": {"weights_path": "{folder}"}}'

    def __init__(self, url: str, body: str = RELOAD, seconds: float = 600.0) -> None:
        self._url, self._body, self._seconds = url, body, seconds

    def __call__(self, update: Update) -> None:
        """Send the request; an engine that does not respond reads the folder when it starts."""
        body = self._body.replace("{folder}", str(update.folder.absolute()))
        body = body.replace("{version}", str(update.version))
        request = urllib.request.Request(self._url, body.encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as response:
                response.read()
        except OSError as error:
            print(
                f"{self._url} has not loaded version {update.version}: {error}", file=sys.stderr, flush=True
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a receiver until it is stopped."""
    parser = argparse.ArgumentParser(description="Keep a Hugging Face folder at a training job's weights.")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--mirror", required=True, type=Path, help="folder; MIRROR/current is the model")
    parser.add_argument("--post", metavar="URL", help="request after each version, for vLLM's reload_weights")
    parser.add_argument("--body", default=Post.RELOAD, help="its JSON, with {folder} and {version}")
    parser.add_argument("--relay", nargs="*", default=[], metavar="HOST:PORT", help="receivers to forward to")
    parser.add_argument("--flows", type=int, default=4, help="connections to each of these")
    options = parser.parse_args(arguments)
    token = os.environ.get(TOKEN, "").strip()
    callbacks = [Post(options.post, options.body)] if options.post else []
    mirror = Mirror(options.mirror, [*callbacks, _print])
    host, _, port = options.listen.rpartition(":")
    receiver = Receiver(mirror, host.strip("[]"), int(port), token)
    feeds = [Feed(mirror, address, token, options.flows) for address in options.relay]
    print(f"listening at {host}:{receiver.port}, {len(feeds)} receivers behind", flush=True)
    threading.Event().wait()


def _print(update: Update) -> None:
    print(f"version {update.version}: {update.folder}", flush=True)


if __name__ == "__main__":
    main()
