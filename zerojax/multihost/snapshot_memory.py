"""Memory that outlives the processes of a job, for snapshots of their state.

The launcher creates a file without a name in memory (memfd) for each process, and passes it as an open file.
No other user can open it. The kernel frees it when the launcher and its processes have ended, also if they
were killed. A container's limit on ``/dev/shm`` does not apply to it.

The file has generations of the same size, so one is complete while another is written. A generation is a
header, a text that describes the arrays, and their bytes. The header is written last, and has the text's
checksum. The text has the arrays' checksums.

Without copies for other hosts there are two. With them there are three of the process itself, so that the one
of the newest copy stays, and two of a process on another host.
"""

import itertools
import mmap
import os
import stat
import struct
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import UInt8

from zerojax.errors import ConfigurationError, RunError

VARIABLE = "ZEROJAX_SNAPSHOT"
"""The environment variable of a process with such memory: the open file, and the fields of ``Intervals``."""

SUPPORTED = hasattr(os, "memfd_create")
"""Whether this system has files in memory without a name; Linux does."""

_HEADER = struct.Struct("<8sQQI")  # magic, where the arrays begin, bytes of the text, its CRC-32
_MAGIC = b"zjsnap01"
_TEXT, _TEXT_EACH = 1 << 20, 512  # room for the text, and more of it for each array
_ALIGNED = 64  # each array begins at a multiple of these bytes
_CHUNK = 1 << 24
# Copying and checksumming release the GIL.
_THREADS = min(16, os.cpu_count() or 1)

Checksums = dict[str, tuple[int, int]]
"""By an array's name, its bytes and its checksum. The arrays are stored in this order."""


def create() -> int:
    """A new file for one process of a job, which only this user can open.

    Raises:
        ConfigurationError: this system has no such files.
    """
    if not SUPPORTED:
        raise ConfigurationError("snapshots in memory need Linux: launch with --snapshot-seconds 0")
    descriptor = os.memfd_create("zerojax-snapshot")
    os.fchmod(descriptor, 0o600)  # Linux gives it 0777
    return descriptor


@dataclass(frozen=True)
class Intervals:
    """How often a job keeps its state.

    Attributes:
        seconds: of work that a restart may repeat.
        copy_seconds: of work that a lost host may cost; 0 if no host keeps another's state.
        distance: nodes from one to the node that keeps its state, on another host; 0 if there is none.
    """

    seconds: float
    copy_seconds: float = 0.0
    distance: int = 0

    @property
    def own(self) -> int:
        """Generations of a process's own state."""
        return 3 if self.distance else 2

    @property
    def copies(self) -> int:
        """Generations of the state of a process on another host."""
        return 2 if self.distance else 0

    def variable(self, descriptor: int) -> str:
        """The environment variable's value for a file."""
        return f"{descriptor} {self.seconds} {self.copy_seconds} {self.distance}"


class SnapshotMemory:
    """The file of one process, with its generations; ``whole`` are its bytes."""

    def __init__(self, descriptor: int, generations: int = 2) -> None:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("no file in memory")
        os.set_inheritable(descriptor, False)  # programs that this one starts do not need it
        self._descriptor, self._count = descriptor, generations
        self._map()

    @classmethod
    def find(cls) -> tuple[Self, Intervals] | None:
        """The memory that the launcher has passed, and how often it is written.

        None if it keeps no snapshots. Later calls return None.

        Raises:
            ConfigurationError: the variable does not name an open file in memory.
        """
        if (given := os.environ.pop(VARIABLE, None)) is None:
            return None
        try:
            descriptor, seconds, copy_seconds, distance = given.split()
            intervals = Intervals(float(seconds), float(copy_seconds), int(distance))
            return cls(int(descriptor), intervals.own + intervals.copies), intervals
        except (ValueError, OSError) as error:
            raise ConfigurationError(
                f"{VARIABLE}={given!r} is not from `zerojax launch` ({error}): unset it"
            ) from None

    def _map(self) -> None:
        size = os.fstat(self._descriptor).st_size
        self._mapped = mmap.mmap(self._descriptor, size) if size else None
        self.whole = np.frombuffer(self._mapped or b"", np.uint8)
        each = size // self._count
        starts = (number * each for number in range(self._count))
        self.generations = [
            Generation(self.whole[start : start + each], self._descriptor, start) for start in starts
        ]

    def update(self) -> bool:
        """Map the file again if another process has changed its size; returns whether one has."""
        if changed := os.fstat(self._descriptor).st_size != self.size:
            self._map()
        return changed

    @property
    def held(self) -> int:
        """Bytes that the file takes now."""
        return os.fstat(self._descriptor).st_blocks * 512

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.whole.size

    def resize(self, arrays: int, count: int) -> None:
        """Make room for ``arrays`` bytes in ``count`` arrays, and drop the file's contents."""
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, self.size_for(arrays, count))
        self._map()

    def size_for(self, arrays: int, count: int) -> int:
        """Bytes of a file whose generations have ``count`` arrays with ``arrays`` bytes together."""
        return self._count * (_start(count) + _rounded(arrays + count * _ALIGNED, mmap.PAGESIZE))

    def touch(self) -> None:
        """Map every page, which leaves the contents as they are.

        In a virtual machine the first write to a page takes eight times as long as later ones.
        """
        pages = self.whole[:: mmap.PAGESIZE]
        parts = np.array_split(pages, max(1, pages.size // 1024))
        for _ in _pool.map(lambda part: np.bitwise_or(part, 0, out=part), parts):
            pass

    def let_go(self) -> None:
        """Take every page out of the process's page table; the next use of a page maps it again.

        Linux takes 0.04 s for each GB of them when a process ends, before it frees the process's GPUs.
        """
        if self._mapped is not None:
            for start in range(0, self.size, _CHUNK):  # each call holds the GIL
                self._mapped.madvise(mmap.MADV_DONTNEED, start, min(_CHUNK, self.size - start))


def _start(count: int) -> int:
    """Where the arrays of a generation begin, if there are ``count``."""
    return _rounded(_TEXT + count * _TEXT_EACH, mmap.PAGESIZE)


def _rounded(size: int, to: int = _ALIGNED) -> int:
    return -(-size // to) * to


class Generation:
    """One snapshot of a process, complete or not, in its ``memory``: the bytes of a file from ``start``."""

    def __init__(self, memory: UInt8[np.ndarray, " bytes"], file: int, start: int) -> None:
        self.memory = memory
        self._file, self.start = file, start

    def text(self) -> str | None:
        """The description of a complete snapshot; None if there is none."""
        if self.memory.size < _HEADER.size:
            return None
        magic, _, length, crc = _HEADER.unpack(self.memory[: _HEADER.size])
        text = self.memory[_HEADER.size : _HEADER.size + length].tobytes()
        return text.decode() if magic == _MAGIC and len(text) == length and zlib.crc32(text) == crc else None

    def write(
        self,
        sizes: Mapping[str, int],
        fill: Callable[[Mapping[str, UInt8[np.ndarray, " bytes"]]], None],
        describe: Callable[[Checksums], str],
    ) -> int:
        """Replace the snapshot; returns the bytes of its arrays.

        Args:
            sizes: bytes of each array, by name.
            fill: copies the arrays to their places in the memory, which it gets by name.
            describe: returns the text, from the arrays' checksums.

        Raises:
            RunError: the arrays or the text are larger than the room.
        """
        self.memory[: _HEADER.size] = 0
        start = _start(len(sizes))
        if start + sum(map(_rounded, sizes.values())) > self.memory.size:
            raise RunError("a snapshot outgrows its memory: the run's arrays have changed their sizes")
        fill(self._places(start, sizes))
        text = describe(self._checksums(start, sizes)).encode()
        if _HEADER.size + len(text) > start:
            raise RunError(f"a snapshot's description has {len(text):,} bytes, and room for {start:,}")
        self.memory[_HEADER.size : _HEADER.size + len(text)] = np.frombuffer(text, np.uint8)
        header = _HEADER.pack(_MAGIC, start, len(text), zlib.crc32(text))
        self.memory[: _HEADER.size] = np.frombuffer(header, np.uint8)
        return sum(sizes.values())

    def arrays(self, sums: Checksums) -> dict[str, UInt8[np.ndarray, " bytes"]]:
        """The bytes of a complete snapshot's arrays, in place, by name."""
        return self._places(self._begin, _sizes(sums))

    def is_intact(self, sums: Checksums) -> bool:
        """Whether the arrays have the checksums of the description."""
        return self._checksums(self._begin, _sizes(sums)) == sums

    @property
    def _begin(self) -> int:
        """Where the arrays of a complete snapshot begin."""
        _, start, _, _ = _HEADER.unpack(self.memory[: _HEADER.size])
        return start

    def _places(self, start: int, sizes: Mapping[str, int]) -> dict[str, UInt8[np.ndarray, " bytes"]]:
        return {name: self.memory[at : at + sizes[name]] for name, at in _starts(start, sizes).items()}

    def _checksums(self, start: int, sizes: Mapping[str, int]) -> Checksums:
        starts = _starts(self.start + start, sizes)
        return {name: (size, _checksum(self._file, starts[name], size)) for name, size in sizes.items()}


def copy_bytes(source: np.ndarray, target: UInt8[np.ndarray, " bytes"]) -> None:
    """Copy an array's bytes to memory of their size, in several threads."""
    flat = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
    _by_chunks(lambda at: np.copyto(target[at : at + _CHUNK], flat[at : at + _CHUNK]), flat.size)


def _sizes(sums: Checksums) -> dict[str, int]:
    return {name: size for name, (size, _) in sums.items()}


def _starts(start: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Where each array begins, if the first begins at ``start``."""
    ends = itertools.accumulate(map(_rounded, sizes.values()), initial=start)
    return dict(zip(sizes, ends, strict=False))


def _checksum(file: int, start: int, size: int) -> int:
    """A checksum of some bytes of a file, by CRC-32 of each chunk."""

    def of_chunk(at: int) -> int:
        if not hasattr(_own, "buffer"):
            _own.buffer = bytearray(_CHUNK)
        part = memoryview(_own.buffer)[: min(_CHUNK, size - at)]
        # Read, not mapped: a process with a large page table takes long to end (SnapshotMemory.let_go).
        return zlib.crc32(part[: os.preadv(file, [part], start + at)])

    return zlib.crc32(np.array(_by_chunks(of_chunk, size), np.uint32).tobytes())


def _by_chunks[T](work: Callable[[int], T], size: int) -> list[T]:
    """Do the work for each chunk of some bytes, given its first byte; several chunks in several threads."""
    starts = range(0, size, _CHUNK)
    # Beside a thread that holds the GIL, each change of threads takes milliseconds.
    return list(map(work, starts) if len(starts) < 2 else _pool.map(work, starts))


_pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="snapshot")
_own = threading.local()
