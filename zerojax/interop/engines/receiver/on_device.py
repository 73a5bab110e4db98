"""Applies patches to tensors in an engine's GPU memory. Needs PyTorch.

Patches cross to the GPU as they arrived, and are decoded and checked there while the engine still computes.
Only the writes wait for a pause of the engine.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from .manifest import Manifest, Piece, Strip
from .mirror import Replica
from .patches import FULL, UNSIGNED, Patch, PatchError, checksums, decode, elements

_WORD = 0xFFFFFFFF
_BATCH = 16 << 20
"""Bytes of patches that are decoded together: short kernels cost more to start than to run."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}

Place = tuple[int, int, int, Strip]
"""A run of a piece (place, first and last element of the matrix) and a rectangle that it crosses."""


@dataclass(frozen=True)
class Changes:
    """Decoded changes in one tensor.

    Attributes:
        tensor: the tensor's number in the manifest.
        at: positions in the flat tensor.
        values: the new elements' bits.
    """

    tensor: int
    at: torch.Tensor
    values: torch.Tensor


class DeviceReplica(Replica):
    """An engine's tensors on a device, which change in place during a pause of the engine.

    Args:
        tensors: gets the manifest of a job, and returns the engine's contiguous tensors by name.
        pause: a context for writing a version, in which the engine computes nothing.
    """

    def __init__(
        self,
        tensors: Callable[[Manifest], Mapping[str, torch.Tensor]],
        pause: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        super().__init__()
        self._find, self._pause = tensors, pause
        self._lock, self._decoding = threading.Lock(), threading.Lock()

    def _start(self, session: str, manifest: Manifest, version: int) -> None:
        found = self._find(manifest)
        super()._start(session, manifest, version)
        self._tensors = [
            found[name].view(-1).view(_INTEGERS[found[name].itemsize]) for name, *_ in manifest.tensors
        ]
        self._places: dict[int, list[Place]] = {}
        self._waiting: list[Patch] = []
        self._bytes = 0  # of these
        self._staged: dict[int, list[Patch]] = {}  # since the version that the engine serves
        self._changes: list[Changes] = []
        self._wholes: dict[int, torch.Tensor] = {}

    def _write(self, patch: Patch, piece: Piece) -> None:
        """Check a patch, or let it wait until a batch is full."""
        with self._lock:
            earlier = self._staged.setdefault(patch.piece, [])
            earlier.append(patch)
            is_whole = patch.before == FULL or len(earlier) > 1
            if not is_whole:
                self._waiting.append(patch)
                self._bytes += len(patch.body)
                if self._bytes < _BATCH:
                    return
        self._decode_waiting()
        if is_whole:
            self._stage_whole(patch, piece, earlier)

    def _decode_waiting(self) -> None:
        """Decode the patches that wait now, once other threads have decoded theirs."""
        with self._decoding:
            with self._lock:
                batch, self._waiting, self._bytes = self._waiting, [], 0
            self._decode(batch)

    def _stage_whole(self, patch: Patch, piece: Piece, patches: list[Patch]) -> None:
        values = self._whole(piece, patches)
        self._compare(patch, checksums(values))
        self._sums[patch.piece] = patch.sums
        self._wholes[patch.piece] = torch.from_numpy(values.view(f"<i{piece.itemsize}"))

    def _whole(self, piece: Piece, patches: Sequence[Patch]) -> np.ndarray:
        """A piece after several patches, on the host: rare, after missed versions."""
        first = max((i for i, patch in enumerate(patches) if patch.before == FULL), default=-1)
        if first >= 0:
            values = elements(patches[first], piece.size, piece.itemsize)
            if patches[first + 1 :] or not values.flags.writeable:
                values = values.copy()
        else:
            values = self.read(piece).cpu().numpy().view(UNSIGNED[piece.itemsize])
        for patch in patches[first + 1 :]:
            places, differences = decode(patch, piece.size, piece.itemsize)
            values[places] += differences
        return values

    def _decode(self, batch: Sequence[Patch]) -> None:
        """Check patches and keep their changes.

        Raises:
            PatchError: some do not fit. Their pieces must be sent in full.
        """
        good: set[int] = set()
        try:
            for itemsize in {self._piece(patch).itemsize for patch in batch}:
                own = [patch for patch in batch if self._piece(patch).itemsize == itemsize]
                good |= self._keep(sorted(own, key=lambda patch: patch.piece), itemsize)
        finally:
            bad = [patch.piece for patch in batch if patch.piece not in good]
            with self._changed:
                for number in bad:
                    self._move(number, FULL)
                    self._staged.pop(number, None)
        if bad:
            raise PatchError(f"pieces {bad} would not have the sender's checksums: send them in full")

    def _keep(self, batch: Sequence[Patch], itemsize: int) -> set[int]:
        """Keep the changes of patches with the right checksums, and return their pieces."""
        device, mask = self._tensors[0].device, (1 << 8 * itemsize) - 1
        decoded = Decoded(batch, [self._piece(patch).size for patch in batch], itemsize, device)
        old = torch.zeros_like(decoded.places)
        points = self._points(batch, decoded)
        for tensor, at, index in points:
            old[index] = self._tensors[tensor][at].long()
        old &= mask
        new = (old + decoded.differences) & mask
        good: dict[int, tuple[int, int]] = {}
        for patch, added in zip(batch, decoded.checksums(old, new, itemsize).tolist(), strict=True):
            before = self._sums[patch.piece]
            assert before is not None
            if patch.sums == tuple((x + y) & _WORD for x, y in zip(before, added, strict=True)):
                good[patch.piece] = patch.sums
        if len(good) < len(batch):
            return self._keep(rest, itemsize) if (rest := [p for p in batch if p.piece in good]) else set()
        values = new.to(_INTEGERS[itemsize])
        self._changes += [Changes(tensor, at.int(), values[index]) for tensor, at, index in points]
        for number, sums in good.items():
            self._sums[number] = sums
        return set(good)

    def _points(
        self, batch: Sequence[Patch], decoded: "Decoded"
    ) -> list[tuple[int, torch.Tensor, slice | torch.Tensor]]:
        """A tensor's number, positions there, and which changes these are."""
        places = [self._places_of(patch.piece) for patch in batch]
        if all(len(own) == 1 for own in places):
            return self._points_of_tensors(batch, [own[0] for own in places], decoded)
        nothing = (0, 0, 0, Strip(0, 0, 0, 0, 0, 0, 0, 0))
        found: list[tuple[int, torch.Tensor, slice | torch.Tensor]] = []
        for k in range(max(map(len, places))):
            own = [one[k] if k < len(one) else nothing for one in places]
            at, inside = decoded.points(self._rows(batch, own))
            for number, (*_, strip) in enumerate(own):
                start, stop = decoded.ends[number : number + 2]
                if len(index := start + torch.nonzero(inside[start:stop])[:, 0]):
                    found.append((strip.tensor, at[index], index))
        return found

    def _points_of_tensors(
        self, batch: Sequence[Patch], places: Sequence[Place], decoded: "Decoded"
    ) -> list[tuple[int, torch.Tensor, slice | torch.Tensor]]:
        """``_points``, if each piece is in one tensor: neighbours of the same tensor are taken together."""
        at, inside = decoded.points(self._rows(batch, places))
        if not bool(inside.all()):
            raise PatchError("a patch changes elements in the padding of a piece")
        found: list[tuple[int, torch.Tensor, slice | torch.Tensor]] = []
        for tensor, group in groupby(range(len(batch)), lambda number: places[number][3].tensor):
            numbers = [*group]
            index = slice(decoded.ends[numbers[0]], decoded.ends[numbers[-1] + 1])
            found.append((tensor, at[index], index))
        return found

    def _rows(self, batch: Sequence[Patch], places: Sequence[Place]) -> list[tuple[int, ...]]:
        widths = [self._piece(patch).width for patch in batch]
        return [
            (place, first, last, w, s.top, s.bottom, s.left, s.end, s.offset, s.down, s.right)
            for (place, first, last, s), w in zip(places, widths, strict=True)
        ]

    def _piece(self, patch: Patch) -> Piece:
        assert self.manifest is not None
        return self.manifest.pieces[patch.piece]

    def _places_of(self, number: int) -> list[Place]:
        if number not in self._places:
            assert self.manifest is not None
            piece = self.manifest.pieces[number]
            self._places[number] = [
                (*run, strip)
                for run in piece.runs
                for strip in piece.strips
                if run[1] // piece.width < strip.bottom and (run[2] - 1) // piece.width >= strip.top
            ]
        return self._places[number]

    def _serve(self, version: int) -> None:
        self._decode_waiting()
        self._wait()
        with self._pause(version):
            for one in self._changes:
                self._tensors[one.tensor][one.at.long()] = one.values
            for number, values in self._wholes.items():
                assert self.manifest is not None
                values = values.to(self._tensors[0].device)
                for strip, own, block in self.manifest.pieces[number].blocks(values):
                    _view(strip, self._tensors)[own] = block
            self._wait()
        with self._changed:
            self._changes, self._wholes, self._staged = [], {}, {}
            self.version = version
            self._changed.notify_all()

    def _wait(self) -> None:
        if self._tensors[0].is_cuda:
            torch.cuda.synchronize(self._tensors[0].device)

    def read(self, piece: Piece) -> torch.Tensor:
        """All elements of a piece as the engine has them, padding included."""
        kind = _INTEGERS[piece.itemsize]
        values = torch.zeros(piece.size, dtype=kind, device=self._tensors[0].device)
        for strip, own, block in piece.blocks(values):
            block[:] = _view(strip, self._tensors)[own]
        return values


def _view(strip: Strip, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    shape = strip.bottom - strip.top, strip.end - strip.left
    # as_strided counts from the storage, in which an engine's tensor may begin anywhere.
    return torch.as_strided(tensors[strip.tensor][strip.offset :], shape, (strip.down, strip.right))


class Decoded:
    """The changes of several patches, one after another, decoded on a device.

    Args:
        batch: patches that are not full.
        sizes: elements of each piece.
        itemsize: bytes of an element.
        device: the device.

    Attributes:
        ends: where each patch's changes begin, and the number of all.
        places: positions in the pieces.
        differences: what is added to the elements.

    Raises:
        PatchError: as ``decode``.
    """

    def __init__(
        self, batch: Sequence[Patch], sizes: Sequence[int], itemsize: int, device: torch.device
    ) -> None:
        bits = 8 * itemsize
        headers = [(p.count, p.escaped, p.low, p.bits, len(p.body)) for p in batch]
        count, escaped, low, wide, length = np.array(headers, np.int64).T
        size = np.array(sizes, np.int64)
        valid = (count <= size) & (escaped <= count) & (low <= 32) & (wide >= 1) & (wide <= bits)
        widths = np.stack([count * low, count * wide, escaped * bits])
        sections = np.cumsum(np.concatenate([[0 * count], -(-widths // 32)]), axis=0)
        if not (valid & (sections[-1] * 4 <= length) & (length % 4 == 0)).all():
            raise PatchError("the header of a patch is invalid, or its body was cut off")
        ends = np.cumsum(np.append(0, length // 4))
        words = torch.frombuffer(bytearray(b"".join(p.body for p in batch) + bytes(8)), dtype=torch.int32)
        self._words = words.to(device)
        self.ends: list[int] = np.cumsum(np.append(0, count)).tolist()
        self._device = device
        self._owner = torch.repeat_interleave(self._table(count))
        self._index = torch.arange(self.ends[-1], device=device) - self._of(np.array(self.ends[:-1]))
        starts = 32 * (sections + ends[:-1])
        quotients = self._quotients(starts[3] // 32, ends[1:], np.array(self.ends))
        gaps = (quotients << self._of(low)) + self._numbers(starts[0], low)
        self.places = self._within(torch.cumsum(gaps + 1, 0)) - 1
        last = self.places[self._table(np.array(self.ends[1:])[count > 0] - 1)]
        if bool((last >= self._table(size[count > 0])).any()):
            raise PatchError("a patch changes an element outside its piece")
        codes = self._numbers(starts[1], wide)
        escapes = codes == self._of((1 << wide) - 1)
        ranks = self._within(torch.cumsum(escapes, 0)) - 1
        if int(escapes.sum()) != escaped.sum():
            raise PatchError("a patch has a wrong number of escaped values")
        at = (self._of(starts[2]) + ranks * bits)[escapes]
        codes += 1
        codes[escapes] = self._read(at, (1 << bits) - 1)
        self.differences = (codes >> 1) ^ -(codes & 1)

    def _table(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._device)

    def _of(self, values: np.ndarray) -> torch.Tensor:
        """A number of each patch, for each change."""
        return self._table(values)[self._owner]

    def _within(self, sums: torch.Tensor) -> torch.Tensor:
        """Sums over the changes of each patch, from values for all changes."""
        padded = torch.nn.functional.pad(sums, (1, 0))
        return sums - padded[self._table(np.array(self.ends[:-1]))][self._owner]

    def _read(self, bit: torch.Tensor, mask: torch.Tensor | int) -> torch.Tensor:
        """The numbers that begin at a bit."""
        word, shift = bit >> 5, bit & 31
        pair = (self._words[word].long() & _WORD) | (self._words[word + 1].long() << 32)
        return (pair >> shift) & mask

    def _numbers(self, start: np.ndarray, width: np.ndarray) -> torch.Tensor:
        """Numbers of equal width within a patch, from its bit ``start`` on."""
        bit = self._of(start) + self._index * self._of(width)
        return self._read(bit, self._of((1 << width) - 1))

    def _quotients(self, starts: np.ndarray, stops: np.ndarray, ends: np.ndarray) -> torch.Tensor:
        """The unary codes in the words [starts, stops) of each patch."""
        lengths = stops - starts
        firsts = np.cumsum(np.append(0, lengths))
        owner = torch.repeat_interleave(self._table(lengths))
        word = torch.arange(int(firsts[-1]), device=self._device) + self._table(starts - firsts[:-1])[owner]
        bits = self._words[word, None] >> torch.arange(32, dtype=torch.int32, device=self._device)
        ones = torch.nonzero((bits & 1).view(-1))[:, 0]
        found = torch.searchsorted(ones, self._table(32 * firsts)).cpu().numpy()
        if not np.array_equal(found, ends):
            raise PatchError("a patch has a wrong number of positions")
        previous = torch.nn.functional.pad(ones[:-1], (1, 0)) if len(ones) else ones
        return ones - torch.where(self._index == 0, self._of(32 * firsts[:-1]) - 1, previous) - 1

    def points(self, rows: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions in flat tensors, and whether a change is in the rectangle of its patch's row."""
        table = np.array(rows, np.int64).T
        place, first, last, width, top, bottom, left, end, offset, down, right = map(self._of, table)
        element = self.places - place + first
        row = torch.div(element, width.clamp(min=1), rounding_mode="floor")
        column = element - row * width
        inside = (element >= first) & (element < last) & (row >= top) & (row < bottom)
        inside &= (column >= left) & (column < end)
        return offset + (row - top) * down + (column - left) * right, inside

    def checksums(self, old: torch.Tensor, new: torch.Tensor, itemsize: int) -> torch.Tensor:
        """What each patch adds to the two checksums of its piece."""
        each = 4 // itemsize
        word = torch.div(self.places, each, rounding_mode="floor")
        change = (new - old) << (self.places - word * each) * (8 * itemsize)
        both = [
            torch.nn.functional.pad(torch.cumsum(change * _mixed(x), 0), (1, 0))[
                self._table(np.array(self.ends))
            ]
            for x in (word, ~word & _WORD)
        ]
        return torch.stack([x[1:] - x[:-1] for x in both], 1) & _WORD


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = (x * 0x9E3779B1) & _WORD
    x = ((x ^ x >> 15) * 0x85EBCA77) & _WORD
    return (x ^ x >> 13) | 1
