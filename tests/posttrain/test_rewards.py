"""A reward that fails costs its completion alone."""

import os
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from threading import Timer

import numpy as np
import pytest

from zerojax.errors import ConfigurationError
from zerojax.posttrain.prompts import Prompt
from zerojax.posttrain.rewards import LostReward, RewardProcess
from zerojax.posttrain.rollout import Rollout
from zerojax.posttrain.scorers import FunctionScorer

SOURCE = """
import os, subprocess, sys, time
from beside import BONUS

def met(completion, others):
    open(completion, "w").close()
    while sum(map(os.path.exists, others)) < len(others):
        time.sleep(0.01)
    return 1

def reward(prompt, completion, answer="", **row):
    print("noise on the standard output")
    if completion == "raise":
        raise KeyError("no such answer")
    if completion == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open("child", "w").write(str(child.pid))
        time.sleep(60)
    if "meets" in row:
        return met(completion, row["meets"])
    if completion == "exit":
        os._exit(3)
    if completion == "fork" and os.fork() == 0:
        raise ValueError("in the child")
    if completion == "daemon":
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
        os._exit(3)
    if completion == "huge":
        return 1e300
    if completion == "long":
        raise ValueError("two\\nlines" * 1000)
    if completion == "row":
        return list(row.values()) == ["2020-01-02", "1.5"]
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
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("BONUS = 100")
    return "scores.py:reward"


@pytest.fixture
def process(function: str) -> Iterator[RewardProcess]:
    with closing(RewardProcess(function, 1.0)) as process:
        yield process


def rollout(texts: list[str], **row: object) -> Rollout:
    prompts = [Prompt(np.zeros(1, np.int32), "x" * number, row) for number in range(len(texts))]
    none = np.zeros((len(texts), 1), np.float32)
    return Rollout(prompts, texts, none.astype(np.int32), none, none, none[:, 0] > 0)


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def test_a_reward_gets_prompt_completion_and_row(process: RewardProcess) -> None:
    assert process.score("abc", "x", {"answer": "x", "more": 0.5}) == 103.5
    assert process.score("ä\nß", "y", {}) == 3
    assert process.score("", "platform", {}) == 1
    assert process.score("", "row", {"when": date(2020, 1, 2), "price": Decimal("1.5")}) == 1


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ("raise", "KeyError: 'no such answer'"),
        ("nan", "the reward is nan"),
        ("huge", r"the reward is 1e\+300"),
        ("long", "^ValueError: two [linestwo ]{100,500}$"),
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


def test_a_child_that_comes_back_from_the_function_answers_nothing(process: RewardProcess) -> None:
    for number in range(3):
        assert process.score("x" * number, "fork", {}) == number


def test_a_child_that_lives_on_holds_up_nothing(process: RewardProcess) -> None:
    began = time.monotonic()
    with pytest.raises(LostReward):
        process.score("", "daemon", {})
    assert time.monotonic() - began < 10
    assert process.score("abc", "", {}) == 103


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
        FunctionScorer(function, 1.0, 2)


@pytest.mark.parametrize("workers", [1, 3])
def test_rewards_are_in_the_order_of_the_completions(
    function: str, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [""] * 12
    texts[2], texts[5], texts[9] = "hang", "exit", "raise"
    scorer = FunctionScorer(function, 1.0, workers)
    for _ in range(2):  # the processes are those of the rollout before
        found, why = scorer.score(rollout(texts, answer="none"))
        lost = np.isin(texts, ("hang", "exit", "raise"))
        np.testing.assert_array_equal(found, np.where(lost, np.nan, np.arange(12)).astype(np.float32))
        assert why == "KeyError: 'no such answer'"
        said = f"zerojax: 3 of 12 rewards are lost, the last one: {why}\n"
        assert said in capsys.readouterr().err
    scorer.close()


def test_no_more_processes_start_than_score_at_once(function: str) -> None:
    scorer = FunctionScorer(function, 30.0, 100_000)
    pids = [scorer.score(rollout(["pid"]))[0].item() for _ in range(3)]
    assert len({*pids}) == 1
    scorer.close()


def test_several_completions_are_scored_at_once(function: str) -> None:
    scorer, texts = FunctionScorer(function, 30.0, 3), ["one", "two", "three"]
    found, why = scorer.score(rollout(texts, meets=texts))
    assert (found.tolist(), why) == ([1, 1, 1], "")
    # The end of the run does not wait for rewards.
    began = time.monotonic()
    Timer(0.2, scorer.close).start()
    found, why = scorer.score(rollout(texts, meets=["nobody"]))
    assert np.isnan(found).all()
    assert why == "its process has ended"
    assert time.monotonic() - began < 20
