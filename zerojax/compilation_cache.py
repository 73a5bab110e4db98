"""Keeps compiled programs in a folder, from which later processes load them.

JAX's persistent compilation cache looks for a program under its key, a hash of the program, its options, the
devices, and the versions of JAX and of the driver. This module replaces the files behind it. JAX writes its
files in place, so a process that dies, or a full disk, leaves a broken program for good. JAX bounds their
total size by a lock that all readers wait for. And only process 0 writes them, so other hosts' folders stay
empty. Here a file has a checksum and appears as a whole, every process may write, and adding a file removes
the least recently used ones.
"""

import hashlib
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import jax
from jax._src import compilation_cache, compiler  # JAX has no public way to exchange the files
from jax._src.compilation_cache_interface import CacheInterface
from jaxlib._jax import CompileOnlyPyClient

import pallas_kernels
from zerojax.errors import error_line
from zerojax.formatting import size
from zerojax.log import logger

AUTO, OFF = "auto", "off"
"""Values of the setting ``cluster.compilation_cache`` that are not a folder."""

_LIMIT = 4 * 10**9
"""The most bytes in a folder, unless JAX_COMPILATION_CACHE_MAX_SIZE is set."""
_MINIMUM = 0.0
"""Seconds that a program must take to compile, unless JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS is set.

A process that compiles nothing does not start the compiler: at a restart on an H200 the first program, though
small, took 6 s.
"""
_SUFFIX, _PART = ".zerojax", ".part"
_ABANDONED = 3600
"""Seconds after which an incomplete file is removed."""
_DIGEST = 32
_compiles_nothing = ContextVar("compiles nothing", default=False)
_read_program: Callable[..., Any] = compilation_cache.get_executable_and_time


def user_folder() -> Path:
    """zerojax's folder in the user's cache folder.

    Raises:
        RuntimeError: the user has no home.
    """
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "zerojax"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "zerojax"


def use_compilation_cache(folder: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep compiled programs in a folder, and load the programs that are there.

    Call it before the first program is compiled. Commands of zerojax call it by themselves. A loaded program
    computes the same results as a newly compiled one. Many processes may use a folder at the same time, also
    on several hosts. If a file cannot be read or written, one line says so, and the program is compiled.

    Whoever can write to the folder can make this process run code: share it only with users whom you trust.

    Args:
        folder: for the programs. The default is ``JAX_COMPILATION_CACHE_DIR``, else ``zerojax/compiled`` in
            ``XDG_CACHE_HOME``, ``~/.cache``, or on macOS ``~/Library/Caches``. It holds at most 4 GB, or
            ``JAX_COMPILATION_CACHE_MAX_SIZE`` bytes: the least recently used programs are removed.

    Returns:
        The folder; None if ``JAX_ENABLE_COMPILATION_CACHE=false`` turns the cache off, or if no folder is
        given and the user has no home.
    """
    if not jax.config.jax_enable_compilation_cache:
        return None
    chosen = folder or jax.config.jax_compilation_cache_dir
    try:
        path = Path(chosen).absolute() if chosen else user_folder() / "compiled"
    except RuntimeError:  # no home
        return None
    with suppress(OSError):  # ``put`` will report it
        path.mkdir(mode=0o777 if chosen else 0o700, parents=True, exist_ok=True)
    minimum = jax.config.jax_persistent_cache_min_compile_time_secs
    if minimum == 1 and "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:  # JAX's default
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MINIMUM)
    # XLA's own cache of tuned fusions has no size limit, and a compilation fails if it cannot write to it.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    jax.config.update("jax_compilation_cache_dir", str(path))
    compilation_cache.get_file_cache = _open
    compilation_cache.get_executable_and_time = _load  # pyrefly: ignore[bad-assignment]  (JAX passes no names)
    compiler._cache_write = _keep
    compilation_cache.reset_cache()
    pallas_kernels.keep_lowered(Folder(str(path)))
    return path


def apply_setting(setting: str) -> None:
    """Apply ``cluster.compilation_cache``: "auto", "off" or a folder."""
    if setting == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
    else:
        use_compilation_cache(None if setting == AUTO else setting)


def describe() -> str:
    """A description of where compiled programs are kept, how many, and how large."""
    folder = jax.config.jax_compilation_cache_dir
    if not jax.config.jax_enable_compilation_cache or not folder:
        return "not kept: every process compiles its own"
    entries = _entries(Path(folder))
    held = size(sum(length for _, length, _ in entries))
    text = f"{len(entries)} ({held} of at most {size(_limit())}) in {folder}"
    return text if os.access(folder, os.W_OK) else f"{text}, which cannot be written to"


def load(lowered: jax.stages.Lowered) -> bool:
    """Load a program for later calls of its function, if it is kept; returns whether it is.

    It never compiles the program, which could take memory of a GPU that another process uses.
    """
    if not jax.config.jax_enable_compilation_cache or not jax.config.jax_compilation_cache_dir:
        return False
    raises = jax.config.jax_raise_persistent_cache_errors
    jax.config.update("jax_raise_persistent_cache_errors", True)
    token = _compiles_nothing.set(True)
    try:
        lowered.compile()
    except _NotKeptError:
        return False
    finally:
        _compiles_nothing.reset(token)
        jax.config.update("jax_raise_persistent_cache_errors", raises)
    return True


class _NotKeptError(Exception):
    """A program is not kept."""


class Folder(CacheInterface):
    """Files of compiled programs, with the interface of JAX's cache; see the module.

    A program may run only on the kind of processor for which it was compiled: its file's name ends with a
    hash of the processor.
    """

    def __init__(self, path: str) -> None:
        """Use a folder, which need not exist."""
        self._path = Path(path)
        self._reads, self._writes = True, _limit() > 0
        self._written = math.inf  # bytes since the folder was listed

    def get(self, key: str) -> bytes | None:  # pyrefly: ignore[bad-override]
        """The program of a key; None if there is none, or if it is damaged."""
        place = self._place(key)
        try:
            content = place.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            if self._reads:
                logger.warning(f"{self._path}: compiled programs cannot be read: {error.strerror}")
            self._reads = self._writes = False
            return None
        digest, program = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            self.drop(key, "is damaged")
            return None
        with suppress(OSError):
            os.utime(place)  # used now
        return program

    def put(self, key: str, value: bytes) -> None:
        """Keep a program. If that fails, say why, and keep no more programs of this process."""
        if not self._writes or len(value) > _limit() or self._place(key).exists():
            return
        part = self._path / f"{uuid4().hex}{_PART}"
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            part.write_bytes(hashlib.sha256(value).digest() + value)
            part.replace(self._place(key))
        except OSError as error:
            self._writes = False
            logger.warning(f"{self._path}: compiled programs are not kept: {error.strerror}")
            with suppress(OSError):
                part.unlink()
        else:
            self._written += len(value)
            if self._written > _limit() / 100:  # listing a large folder takes as long as many writes
                _trim(self._path)
                self._written = 0

    def drop(self, key: str, why: str) -> None:
        """Remove a program, and say why."""
        logger.warning(f"{self._place(key)} {why}: compiling again")
        with suppress(OSError):
            self._place(key).unlink()

    def _place(self, key: str) -> Path:
        return self._path / f"{key}-{_processor()}{_SUFFIX}"


def _open(path: str) -> tuple[CacheInterface, str]:
    """JAX's ``get_file_cache``, with the files of this module."""
    return Folder(path), path


def _load(key: str, options: Any, backend: Any, *others: Any) -> tuple[Any, int | None]:
    """JAX's ``get_executable_and_time``, without its warning of several lines."""
    found = None, None
    try:
        found = _read_program(key, options, backend, *others)
    except Exception as error:  # the runtime may refuse a program for many reasons
        files = compilation_cache._get_cache(backend)
        if isinstance(files, Folder):
            files.drop(key, f"cannot be loaded ({error_line(error)})")
    if found[0] is None and _compiles_nothing.get():
        raise _NotKeptError
    return found


def _keep(cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any) -> None:
    """JAX's ``_cache_write``, but in every process instead of only the first."""
    if isinstance(backend, CompileOnlyPyClient):  # zerojax.aot's programs cannot be loaded here
        return
    if compile_time_secs < jax.config.jax_persistent_cache_min_compile_time_secs:
        return
    try:
        seconds = int(compile_time_secs)
        compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, seconds)
    except jax.errors.JaxRuntimeError as error:  # the runtime cannot write all programs
        logger.warning(f"{module_name} is not kept: {error_line(error)}")


@cache
def _processor() -> str:
    """A short hash of the kind of processor and its instructions."""
    text = platform.machine() + platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _limit() -> int:
    chosen = jax.config.jax_compilation_cache_max_size
    return _LIMIT if chosen < 0 else chosen


def _entries(folder: Path) -> list[tuple[float, int, Path]]:
    """When each program was used, its bytes, and its path."""
    found: list[tuple[float, int, Path]] = []
    with suppress(OSError):
        for path in folder.iterdir():
            if path.suffix in (_SUFFIX, _PART):
                with suppress(OSError):  # another process has removed it
                    about = path.stat()
                    found.append((about.st_mtime, about.st_size, path))
    return found


def _trim(folder: Path) -> None:
    """Remove the least recently used programs until the rest fits, and incomplete files that are old."""
    entries = sorted(_entries(folder))
    total = sum(length for _, length, _ in entries)
    for used, length, path in entries:
        abandoned = path.suffix == _PART and used < time.time() - _ABANDONED
        if abandoned or (total > _limit() and path.suffix == _SUFFIX):
            total -= length
            with suppress(OSError):
                path.unlink()
