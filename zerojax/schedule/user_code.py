"""Where in a user's own code something happened: the innermost line outside JAX, Flax and zerojax."""

import os
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

import flax
import jax
from jax.extend import source_info_util

_LIBRARIES = (
    *(str(Path(str(module.__file__)).parent) + os.sep for module in (jax, flax)),
    str(Path(__file__).parents[1]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep + "contextlib",
    sysconfig.get_path("stdlib") + os.sep + "functools",
    "<",
)


def line_of_equation(info: source_info_util.SourceInfo) -> str:
    """``file:line`` of the code behind an equation, or JAX's summary of it."""
    frames = info.traceback.frames if info.traceback else ()
    return _innermost((f.file_name, f.line_num) for f in frames) or source_info_util.summarize(info)


def line_of_error(error: BaseException) -> str:
    """``file:line`` of the code that raised an error; "" if a library raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return _innermost((f.filename, f.lineno) for f in reversed(frames))


def is_library_error(error: BaseException) -> bool:
    """Whether JAX, Flax or zerojax raised an error, and not the code that calls them."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and not _innermost([(frames[-1].filename, frames[-1].lineno)])


def _innermost(lines: Iterable[tuple[str, int | None]]) -> str:
    """The first of these lines, innermost first, that belongs to no library; "" if all do."""
    return next((f"{name}:{line}" for name, line in lines if not name.startswith(_LIBRARIES)), "")
