"""Runs a user's rewards or environment: ``python worker.py ADDRESS KIND FILE NAME ...``.

KIND is "rewards" for functions, or "environment" for one object. The process connects to the socket at
ADDRESS, sends one line of JSON, and reads one line: the next question, [what, *arguments]. It sends {} after
loading the files. Its responses are

- {"rewards": numbers}, one per function, to ["score", prompt, completion, row];
- {"state": value} to ["reset", prompt, row];
- {"state": value, "observation": messages, "reward": number} to ["step", state, completion];
- {"error": text} after a failure, with "refused": true if every call would fail.

No file descriptor of this exchange is open while a function runs. The file only needs the standard library,
and runs by its path. So the process takes no device and starts quickly.
"""

import importlib.util
import inspect
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_REWARD = 3.4028235e38
"""The largest fp32 number, because rewards are kept in fp32."""

_MAX_ERROR_LENGTH = 500  # characters

Response = dict[str, Any]


class RefusedError(Exception):
    """The function can score no completion."""


def load(file: str, name: str, number: int) -> Any:
    """Load an object from a file, which may import modules in its folder. Raises whatever the file raises."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    module_name = "reward" if number == 0 else f"reward_{number}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def call(function: Callable[..., Any], given: dict[str, Any], row: dict[str, Any] | None = None) -> Any:
    """The result of a user's function, awaited if it is a coroutine.

    Raises:
        RefusedError: the function does not take these arguments.
    """
    row = row or {}
    try:
        inspect.signature(function).bind(*given.values(), **row)
    except TypeError as error:
        names = ", ".join([*given, *(f"{key}=..." for key in row)])
        raise RefusedError(f"{_name(function)}({names}) cannot be called: {error}") from error
    value = function(*given.values(), **row)
    if not inspect.isawaitable(value):
        return value
    import asyncio

    async def wait() -> Any:
        return await value

    return asyncio.run(wait())


def checked_reward(value: Any, function: Callable[..., Any]) -> float:
    """The reward as a float.

    Raises:
        RefusedError: it is a text, a bool (also NumPy's and torch's), or no number.
        ValueError: fp32 cannot hold it.
    """
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    try:
        if is_bool or isinstance(value, str | bytes | bytearray):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError) as error:
        raise RefusedError(f"{_name(function)} returns a {type(value).__name__}, not a number") from error
    if not abs(found) <= MAX_REWARD:
        raise ValueError(f"the reward is {found}")
    return found


def checked_state(value: Any, function: Callable[..., Any]) -> Any:
    """The state. Raises RefusedError if JSON cannot hold it."""
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise RefusedError(f"{_name(function)} returns a state that JSON cannot hold: {error}") from error
    return value


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", "the reward")


class Rewards:
    """A user's reward functions."""

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        self.functions = functions

    def score(self, prompt: str, completion: str, row: dict[str, Any]) -> Response:
        """The reward by each function."""
        given = {"prompt": prompt, "completion": completion}
        return {"rewards": [checked_reward(call(one, given, row), one) for one in self.functions]}


class Environment:
    """A user's environment: an object with ``reset`` and ``step``, or its class."""

    def __init__(self, named: list[Any]) -> None:
        (one,) = named
        self.environment: Any = one() if inspect.isclass(one) else one
        for name in ("reset", "step"):
            if not callable(getattr(self.environment, name, None)):
                raise RefusedError(f"{type(self.environment).__name__} has no method {name}")

    def reset(self, prompt: str, row: dict[str, Any]) -> Response:
        """The first state of an episode."""
        reset = self.environment.reset
        return {"state": checked_state(call(reset, {"prompt": prompt}, row), reset)}

    def step(self, state: Any, completion: str) -> Response:
        """The state, observation and reward after a turn of the model.

        Raises:
            RefusedError: the environment returns anything else.
        """
        step = self.environment.step
        value = call(step, {"state": state, "completion": completion})
        if not isinstance(value, tuple | list) or len(value) != 3:
            raise RefusedError("step does not return (state, observation, reward)")
        state, observation, reward = value
        messages = observation if isinstance(observation, list) else [observation]
        if not (isinstance(observation, str | None) or all(isinstance(one, dict) for one in messages)):
            kind = type(observation).__name__
            raise RefusedError(f"step returns a {kind} as observation: return a text, messages or None")
        return {
            "state": checked_state([state, observation], step)[0],
            "observation": observation,
            "reward": checked_reward(reward, step),
        }


KINDS: dict[str, Callable[[list[Any]], Any]] = {"rewards": Rewards, "environment": Environment}


def result_or_error(find: Callable[[], Response]) -> Response:
    """The result of ``find``, or the error that it raised."""
    try:
        return find()
    except RefusedError as error:
        return {"error": str(error)[:_MAX_ERROR_LENGTH], "refused": True}
    except Exception as error:
        return {"error": " ".join(f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH].split())}


def end_group_after(address: str, wait: Callable[..., object], *arguments: Any) -> None:
    """Wait, then remove the socket with its folder, and kill this process and its group."""
    wait(*arguments)
    for remove, path in ((os.unlink, address), (os.rmdir, os.path.dirname(address))):
        with suppress(OSError):  # the trainer or another thread has removed it
            remove(path)
    os.killpg(0, signal.SIGKILL)


def fork_guarded(address: str) -> None:
    """Fork a process to run the user's code, and return in that process.

    The first process leads the group. It kills the group, including all children of the user's code, when the
    second process ends or when standard input ends. The latter means that the trainer, which holds the other
    end, is gone.
    """
    if worker := os.fork():
        threading.Thread(target=end_group_after, args=(address, os.waitpid, worker, 0), daemon=True).start()
        end_group_after(address, os.read, 0, 1)


def main(address: str, kind: str, *named: str) -> None:
    """Respond to questions until the connection ends."""
    fork_guarded(address)
    # The output of a function goes to standard error.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    own, asked = os.getpid(), list[Any]()

    def loaded() -> Response:
        places = enumerate(zip(named[::2], named[1::2], strict=True))
        asked.append(KINDS[kind]([load(file, name, number) for number, (file, name) in places]))
        return {}

    def respond(what: str, *arguments: Any) -> Response:
        return getattr(asked[0], what)(*arguments)

    def exchange(found: Response) -> bytes:
        if os.getpid() != own:  # a function has forked, and its child has returned, too
            os._exit(1)
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(address)
            channel.sendall(json.dumps(found).encode() + b"\n")
            with channel.makefile("rb") as questions:
                return questions.readline()

    found = result_or_error(loaded)
    while question := exchange(found):
        found = result_or_error(lambda: respond(*json.loads(question)))


if __name__ == "__main__":
    main(*sys.argv[1:])
