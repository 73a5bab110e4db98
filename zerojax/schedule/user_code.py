"""Errors about a user's own code: their messages, and the innermost line outside JAX, Flax and zerojax."""

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Generator, Iterable
from pathlib import Path

import flax
import jax
from jax.extend import source_info_util

from zerojax.errors import ConfigurationError

_LIBRARIES = (
    *(folder + os.sep for folder in (*jax.__path__, *flax.__path__)),
    str(Path(__file__).parents[1]) + os.sep,
    sysconfig.get_path("stdlib") + os.sep + "contextlib",
    sysconfig.get_path("stdlib") + os.sep + "functools",
    "<",
)

FORWARD_MODE = (
    "a loss cannot take forward-mode derivatives (jax.jvp, jax.jacfwd, jax.hessian) through a unit or a "
    "Stack: use reverse mode (jax.grad, jax.vjp, jax.jacrev), also for second derivatives (jax.grad of "
    "jax.grad)."
)

_NO_LAYERS = (
    "the loop or map over modules at {} met a value without an axis of layers. Modules that keep their rngs "
    "must keep a fork of them (rngs.fork()). A unit that nnx.vmap stacked must be created in model(rngs): "
    "elsewhere zerojax does not see that it has layers. Or leave its class out of ZeroConfig.units."
)

_COMBINED = (
    "a loss combined the sharded weights of units with other arrays (by jax.tree.map over nnx.state?). "
    "Leave the classes of these units out of ZeroConfig.units. Keep an average of weights in variables that "
    "are not nnx.Param, or take it in the optimizer."
)

# Fragments of JAX's messages about transformations that units do not support, with the messages to show.
_TRANSLATIONS = {
    "can't apply forward-mode": FORWARD_MODE,
    "'custom_lin' not implemented": FORWARD_MODE,
    "does not support reverse-mode autodiff": (
        "a loss cannot contain a gradient through a unit or a Stack for micro-batches in breadth: set "
        'accumulate_order="depth".'
    ),
    "but got uint32": (
        "a loss took a gradient with respect to unsigned integers. If it was with respect to the model "
        "(nnx.grad, MAML), the sharded weights of units have none: leave their classes out of "
        "ZeroConfig.units."
    ),
    "zerojax.schedule.unit.Sharded": _COMBINED,
    "zerojax.weights.Weight": _COMBINED,
}


class InOneBranch(Exception):
    """A ``Stack``, whose call changes its weights' fields, is called in only one of several branches."""


@contextlib.contextmanager
def translated_errors() -> Generator[None]:
    """Replace JAX's and Flax's errors about units by messages that say what to change; keep the user's
    errors.

    Raises:
        ConfigurationError: for such an IndexError, NotImplementedError, TypeError or ValueError.
        InOneBranch: for an error about branches.
    """
    try:
        yield
    except (IndexError, NotImplementedError, TypeError, ValueError) as error:
        if not is_library_error(error):
            raise
        if isinstance(error, IndexError):
            raise ConfigurationError(_NO_LAYERS.format(line_of_error(error))) from error
        if found := re.search(r"Sharded\('(.*?)'\)", str(error)):
            raise ConfigurationError(read_outside(found[1])) from error
        if "branch outputs must" in str(error) and re.search(r"\.value\.(probe|weight) is", str(error)):
            raise InOneBranch from error
        for text, message in _TRANSLATIONS.items():
            if text in str(error):
                raise ConfigurationError(message) from error
        raise


def read_outside(weight: str) -> str:
    """The error message for a weight that is read outside a call of its unit."""
    return (
        f"the weight {weight!r} is sharded and was read outside a call of its unit. For a norm or a penalty "
        "use zerojax.weight_sum. For its values call a method of the unit (in NNX one whose name does not "
        'begin with "_", in Linen one without nn.nowrap), or leave its class out of ZeroConfig.units.'
    )


def assigned(weight: str, by: str) -> str:
    """The error message for a weight to which ``by`` assigned."""
    return (
        f"{by} assigned to the weight {weight!r}, which only the optimizer changes. Compute with the new "
        "value without assigning it, or use an nnx.Variable that is not an nnx.Param. Between steps, "
        "zerojax.put_params changes weights."
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
