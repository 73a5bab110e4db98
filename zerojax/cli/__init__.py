"""The `zerojax` command: one module per subcommand, imported when it is called."""

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence

from zerojax.errors import ZeroError
from zerojax.run_folder import RunError

# name -> (module with `run(arguments)`, what it does)
COMMANDS = {
    "train": ("zerojax.cli.train", "train a model from a config; run again, it goes on"),
    "sample": ("zerojax.cli.sample", "let a trained run write text"),
    "eval": ("zerojax.cli.eval", "measure the validation loss of a trained run"),
    "plan": ("zerojax.cli.plan", "show what a run will hold and send: units, formats, bytes, memory"),
    "comm": ("zerojax.cli.comm", "count every collective of a training step, with its bytes"),
    "launch": ("zerojax.launch", "start zerojax train in several processes on this machine"),
    "doctor": ("zerojax.cli.doctor", "show devices, versions, kernels and the mesh to choose"),
}

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand.

    Args:
        arguments: without the program's name; by default those of the process.

    Returns:
        The exit code: 0; 1 when a run failed; 2 for wrong use or settings; 130 when interrupted.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return EXIT_OK if given else EXIT_WRONG_USE
    name, *rest = given
    if name == "--version":
        print(f"zerojax {importlib.metadata.version('zerojax')}")
        return EXIT_OK
    if name not in COMMANDS:
        return _fail(f"no command {name!r}\n\n{_usage()}", EXIT_WRONG_USE)
    try:
        importlib.import_module(COMMANDS[name][0]).run(rest)
    except RunError as error:
        return _fail(str(error), EXIT_FAILED)
    except ZeroError as error:
        return _fail(str(error), EXIT_WRONG_USE)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever was reading, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return EXIT_OK


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(["usage: zerojax COMMAND ...", "", *lines, "", "zerojax COMMAND --help says more."])


def _fail(message: str, code: int) -> int:
    print(f"zerojax: {message}", file=sys.stderr)
    return code
