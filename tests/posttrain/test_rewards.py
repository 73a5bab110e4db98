"""A reward that fails costs its completion alone."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerojax.errors import ConfigurationError
from zerojax.posttrain.rewards import LostReward, RewardProcess

SOURCE = """
import os, subprocess, sys, time
from beside import BONUS

def reward(prompt, completion, answer="", **row):
    print("noise on the standard output")
    if completion == "raise":
        raise KeyError("no such answer")
    if completion == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open("child", "w").write(str(child.pid))
        time.sleep(60)
    if completion == "exit":
        os._exit(3)
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "a lot"
    if completion == "pid":
        return os.getpid()
    if completion == "platform":
        return os.environ["JAX_PLATFORMS"] == "cpu"
    return len(prompt) + BONUS * (completion == answer) + row.get("more", 0)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardProcess]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("BONUS = 100")
    with RewardProcess("scores.py:reward", 1.0) as process:
        yield process


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def test_a_reward_gets_prompt_completion_and_row(process: RewardProcess) -> None:
    assert process.score("abc", "x", {"answer": "x", "more": 0.5}) == 103.5
    assert process.score("ä\nß", "y", {}) == 3
    assert process.score("", "platform", {}) == 1


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ("raise", "KeyError: 'no such answer'"),
        ("nan", "the reward is nan"),
        ("text", "ValueError: could not convert string to float: 'a lot'"),
    ],
)
def test_an_error_loses_one_reward(process: RewardProcess, completion: str, why: str) -> None:
    pid = process.score("", "pid", {})
    with pytest.raises(LostReward, match=why):
        process.score("", completion, {})
    assert process.score("", "pid", {}) == pid  # it need not start again


def test_a_process_that_hangs_or_ends_is_started_again(process: RewardProcess) -> None:
    began = time.monotonic()
    with pytest.raises(LostReward, match=r"no answer for 1 s \(posttrain.reward_seconds\)"):
        process.score("", "hang", {})
    assert time.monotonic() - began < 10
    child = int(Path("child").read_text())
    assert process.score("abc", "x", {}) == 3
    with pytest.raises(LostReward, match="its process has ended"):
        process.score("", "exit", {})
    assert process.score("abc", "x", {}) == 3
    assert not is_alive(child)


def test_a_closed_process_is_gone(process: RewardProcess) -> None:
    pid = int(process.score("", "pid", {}))
    assert is_alive(pid)
    process.close()
    assert not is_alive(pid)
    assert pid != os.getpid()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("scores.py", r"name a function, as \"path/to/file.py:function\""),
        ("gone.py:reward", "gone.py: no such file"),
        ("scores.py:other", "cannot load scores.py:other: AttributeError"),
        ("broken.py:reward", "cannot load broken.py:reward: SyntaxError"),
    ],
)
def test_what_is_no_function_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.py").write_text("def reward(prompt, completion): return 0")
    (tmp_path / "broken.py").write_text("def reward(")
    with pytest.raises(ConfigurationError, match=message):
        RewardProcess(function, 1.0)
