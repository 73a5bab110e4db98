"""Scores completions with a user's functions: ``python reward_worker.py ADDRESS FILE FUNCTION ...``.

It connects to the socket at ADDRESS to say one line of JSON, and reads one: the next question, [prompt,
completion, row]. The first that it says is {} once the files are loaded, the others are {"rewards": numbers},
one per function, or {"error": text}; "refused" says that no completion can be scored. No descriptor of the
exchange is open while a function runs. Uses the standard library only and is started by its path, so that it
takes no device and starts again in a moment.
"""

import importlib.util
import inspect
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

_MAX_REWARD = 3.4028235e38  # of fp32, in which rewards are kept
_MAX_ERROR_LENGTH = 500  # characters of an error


class RefusedError(Exception):
    """The function can score no completion."""


def load(file: str, name: str, number: int) -> Callable[..., Any]:
    """The function of a file, which may import the modules beside it."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    module_name = "reward" if number == 0 else f"reward_{number}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def finished(value: Any) -> Any:
    """A value, awaited if it is to be."""
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def reward(function: Callable[..., Any], prompt: str, completion: str, row: dict[str, Any]) -> float:
    """What a function says about a completion."""
    name = getattr(function, "__name__", "the reward")
    try:
        inspect.signature(function).bind(prompt, completion, **row)
    except TypeError as error:
        given = ", ".join(["prompt", "completion", *(f"{key}=..." for key in row)])
        raise RefusedError(f"{name}({given}) cannot be called: {error}") from error
    value = finished(function(prompt, completion, **row))
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise RefusedError(f"{name} returns a {type(value).__name__}, not a number") from error
    if not abs(found) <= _MAX_REWARD:
        raise ValueError(f"the reward is {found}")
    return found


def answer(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of ``find``, or the error that it raised."""
    try:
        return find()
    except RefusedError as error:
        return {"error": str(error)[:_MAX_ERROR_LENGTH], "refused": True}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH].split())}


def main(address: str, *named: str) -> None:
    """Answer questions until nobody asks."""
    # What a function prints goes to the standard error.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    own, functions = os.getpid(), list[Callable[..., Any]]()

    def loaded() -> dict[str, Any]:
        for number, (file, name) in enumerate(zip(named[::2], named[1::2], strict=True)):
            functions.append(load(file, name, number))
        return {}

    def scored(prompt: str, completion: str, row: dict[str, Any]) -> dict[str, Any]:
        return {"rewards": [reward(function, prompt, completion, row) for function in functions]}

    def exchange(found: dict[str, Any]) -> bytes:
        if os.getpid() != own:  # a child that a function forked, and that came back
            os._exit(1)
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(address)
            channel.sendall(json.dumps(found).encode() + b"\n")
            with channel.makefile("rb") as questions:
                return questions.readline()

    found = answer(loaded)
    while question := exchange(found):
        found = answer(lambda: scored(*json.loads(question)))


if __name__ == "__main__":
    main(*sys.argv[1:])
