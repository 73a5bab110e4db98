"""The ``zerojax`` command: one module per subcommand, imported on use.

Each module's ``run(arguments)`` prints to standard output. ``main`` reports the ``ZeroJaxError`` it raises.
"""

import atexit
import difflib
import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from zerojax import terminal
from zerojax.documentation import page
from zerojax.errors import (
    EXIT_CODES,
    EXIT_FAILED,
    EXIT_OK,
    EXIT_WRONG_USE,
    ConfigurationError,
    disk_errors,
    file_errors,
    report,
)
from zerojax.log import logger
from zerojax.multihost.background import is_stuck
from zerojax.versions import VERSION

# name -> (module with `run(arguments)`, what it does)
COMMANDS = {
    "train": ("zerojax.cli.train", "train a model from a config, or resume its training"),
    "posttrain": (
        "zerojax.cli.posttrain",
        "train a model with rewards (GRPO, PPO) or on preferences (DPO, IPO)",
    ),
    "sample": ("zerojax.cli.sample", "generate text with a trained run"),
    "chat": ("zerojax.cli.chat", "talk to a trained run in the terminal"),
    "import": ("zerojax.cli.import_model", "start a run from the weights of a Hugging Face model"),
    "export": ("zerojax.cli.export_model", "write a trained model for transformers or vLLM"),
    "follow": ("zerojax.cli.follow", "keep inference engines at the weights of a run, while it trains"),
    "eval": ("zerojax.cli.eval", "measure the validation loss and exact match of a trained run"),
    "report": ("zerojax.cli.run_report", "write an HTML page about a run: curves, speed, bytes, restarts"),
    "overlap": ("zerojax.cli.overlap", "measure how much communication of a profile overlaps compute"),
    "checkpoints": ("zerojax.cli.checkpoints", "list and verify the checkpoints of a run"),
    "plan": ("zerojax.cli.plan", "predict the memory, bytes and speed of a run, for any cluster"),
    "from-deepspeed": ("zerojax.cli.from_deepspeed", "convert a DeepSpeed config to a zerojax config"),
    "comm": ("zerojax.cli.comm", "count the bytes that a training step sends, by collective"),
    "launch": ("zerojax.cli.launch", "start training in several processes on this machine"),
    "emulate": ("zerojax.cli.emulate", "run a command on every node of an emulated cluster"),
    "links": ("zerojax.cli.links", "measure the network between the nodes of a job, and what limits it"),
    "schema": ("zerojax.cli.schema", "print the JSON schema of configs, for editors"),
    "completion": ("zerojax.cli.completion", "print what makes bash or zsh complete the command line"),
    "doctor": ("zerojax.cli.doctor", "show devices, versions and kernels, and suggest a mesh and preset"),
}

# The system's errors about any path that the user names, or below it.
_OF_PATHS = (errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM)

# Beginnings of the names of JAX's debugging and experimental options that zerojax's own models or optax
# cannot run under.
_DEBUGGING = (
    "JAX_DISABLE_JIT",
    "JAX_ERROR_CHECKING_",
    "JAX_NO_",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "JAX_NUMPY_RANK_PROMOTION",
    "JAX_SCAN3",
    "JAX_TRANSFER_GUARD",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: without the program's name; by default the process's arguments.

    Returns:
        The exit code. 0: success. 1: a run failed. 2: wrong use or settings. 3: a run diverged. 4: another
        process of the run was lost. 75: a run stopped on request, saved, and can be resumed. 130: interrupted
        without saving.
    """
    if arguments is not None:
        return _main(list(arguments))
    _prepare_streams()
    sys.unraisablehook = _repeat_interrupt
    try:
        code = _main(sys.argv[1:])
    except Exception as error:
        if not is_stuck():
            raise
        code, _ = report(error)
    if is_stuck():
        terminal.last_words("")
        os._exit(code)
    return code


def program() -> NoReturn:
    """Run the process's command line, and end the process with the exit code of ``main``."""
    code: int | None = None

    def leave() -> None:
        if code is not None:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, AttributeError):  # full, or None because it is closed
                    stream.flush()
            os._exit(code)

    # Registered first, so called last. It ends the process before Python stops the threads that want its
    # lock: if one of them is inside jaxlib 0.11.2, the process would abort, even after a complete run.
    atexit.register(leave)
    code = main()
    sys.exit(code)


def _main(arguments: list[str]) -> int:
    try:
        with disk_errors(Path("standard output")):
            return _run(arguments)
    except tuple(EXIT_CODES) as error:
        return report(error)[0]
    except BrokenPipeError:  # the reader, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in _OF_PATHS:
            raise
        return report(ConfigurationError(f"{error.filename}: {error.strerror}"))[0]


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return EXIT_OK if arguments else EXIT_WRONG_USE
    name, *rest = arguments
    if name == "--version":
        print(f"zerojax {VERSION}")
        return EXIT_OK
    if name not in COMMANDS:
        nearest = difflib.get_close_matches(name, COMMANDS, n=1)
        suggestion = f"; did you mean {nearest[0]}?" if nearest else f"\n\n{_usage()}"
        terminal.stderr.write(f"zerojax: no command {name!r}{suggestion}\n")
        return EXIT_WRONG_USE
    with file_errors(Path(), what="the working directory is gone, change to another: "):
        Path.cwd()
    if name not in ("launch", "emulate"):  # they also start programs of the user
        _leave_debugging()
    try:
        command = importlib.import_module(COMMANDS[name][0])
    except ValueError as error:  # JAX reads its options from the environment when it is imported
        raise ConfigurationError(
            f"JAX refuses an option: {error}. Correct it, or unset the variable"
        ) from error
    command.run(rest)
    return EXIT_OK


def _leave_debugging() -> None:
    """Ignore debugging options of the user's environment, which JAX reads when it is imported."""
    for variable in [name for name in os.environ if name.startswith(_DEBUGGING)]:
        del os.environ[variable]
        logger.warning(f"{variable} is ignored: commands do not run under it")


def _prepare_streams() -> None:
    """Write every line at once and in one piece, and replace characters that the encoding lacks.

    XLA and Gloo write to the same pipe from C++, and could otherwise split a line.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            errors = "replace" if stream.errors == "strict" else stream.errors
            stream.reconfigure(line_buffering=True, write_through=False, errors=errors)


def _repeat_interrupt(ignored: "sys.UnraisableHookArgs") -> None:
    """Repeat an interrupt that Python has ignored, because it arrived in a callback of its garbage collector.

    JAX has such a callback, and a Ctrl-C in it would have no effect.
    """
    if isinstance(ignored.exc_value, KeyboardInterrupt):
        threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(ignored)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: zerojax COMMAND ...",
            "",
            *lines,
            "",
            f"zerojax COMMAND --help describes a command; the documentation begins with {page('index')}.",
        ]
    )
