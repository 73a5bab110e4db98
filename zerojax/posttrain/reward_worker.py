"""Scores completions with a user's function: ``python reward_worker.py FILE FUNCTION``.

Reads a line of JSON, [prompt, completion, row], for each completion and writes one: {"reward": number} or
{"error": text}; the first line that it writes is {} once the file is loaded. Uses the standard library only
and is started by its path, so that it takes no device and starts again in a moment.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

_LARGEST = 3.4028235e38  # of fp32, in which rewards are kept
_LONGEST = 500  # characters of an error


def load(file: str, name: str) -> Callable[..., Any]:
    """The function of a file, which may import the modules beside it."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    spec = importlib.util.spec_from_file_location("reward", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["reward"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def answer(find: Callable[[], dict[str, Any]]) -> str:
    """The result of ``find``, or the error that it raised, as a line of JSON."""
    try:
        found = find()
    except Exception as error:
        found = {"error": " ".join(f"{type(error).__name__}: {error}"[:_LONGEST].split())}
    return json.dumps(found) + "\n"


def main(file: str, name: str) -> None:
    """Answer lines of the standard input until it ends."""
    # What the function prints goes to the standard error.
    questions, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    functions: list[Callable[..., Any]] = []

    def loaded() -> dict[str, Any]:
        functions.append(load(file, name))
        return {}

    def scored(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, Any]:
        reward = float(functions[0](prompt, completion, **row))
        return {"reward": reward} if abs(reward) <= _LARGEST else {"error": f"the reward is {reward}"}

    own = os.getpid()

    def reply(found: str) -> None:
        if os.getpid() != own:  # a child that the function forked, and that came back
            os._exit(1)
        answers.write(found)
        answers.flush()

    reply(answer(loaded))
    for line in questions:
        reply(answer(lambda line=line: scored(*json.loads(line))))


if __name__ == "__main__":
    main(*sys.argv[1:])
