"""A reward that fails costs its completion alone."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import date
from decimal import Decimal
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np
import pytest

from zerojax.errors import ConfigurationError
from zerojax.posttrain.data.prompts import Prompt
from zerojax.posttrain.reward.process import LostReward, RewardProcess, read_line
from zerojax.posttrain.reward.scorers import FunctionScorer
from zerojax.posttrain.rollout.rollout import Rollout
from zerojax.run.config import PosttrainSection, RewardFunction

SOURCE = """
import os, socket, subprocess, sys, time
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
        return float(list(row.values()) == ["2020-01-02", "1.5"])
    if completion == "nan":
        return float("nan")
    if completion == "text":
        return "1.5"
    if completion == "bool":
        return True
    if completion == "numpy bool":
        import numpy
        return numpy.bool(True)
    if completion == "pid":
        return os.getpid()
    if completion == "colours":
        raise ValueError("\\x1b[31mred")
    if completion == "print":
        os.write(2, b"\\x1b]0;title\\x07 printed\\n")
        return 1
    if completion == "descriptors":
        for fd in range(3, 256):
            try:
                os.write(fd, b"garbage")
            except OSError:
                pass
        os.closerange(3, 4096)
        return 7
    if completion == "platform":
        return float(os.environ["JAX_PLATFORMS"] == "cpu")
    if "sends" in row:
        with socket.socket(socket.AF_UNIX) as channel:
            channel.connect(sys.argv[1])
            channel.sendall((row["sends"] * row["times"]).encode())
            time.sleep(60)
    return len(prompt) + BONUS * (completion == answer) + row.get("more", 0)

async def slowly(prompt, completion, **row):
    import asyncio
    await asyncio.sleep(0.001)
    return len(completion)

def narrow(prompt, completion, answer):
    return 1

def several(prompt, completion, **row):
    return [1.0]

def table(prompt, completion, **row):
    return {"reward": 1.0}

def fussy(prompt, completion, **row):
    return 1 / len(completion)

def environment(prompt, completion, **row):
    return sum(2**i for i, name in enumerate(row["names"]) if name in os.environ)
"""


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scores.py").write_text(SOURCE)
    (tmp_path / "beside.py").write_text("BONUS = 100")
    return "scores.py:reward"


@pytest.fixture
def process(function: str) -> Iterator[RewardProcess]:
    with closing(RewardProcess([function], 1.0)) as process:
        yield process


def rollout(texts: list[str], **row: object) -> Rollout:
    prompts = [Prompt(np.zeros(1, np.int32), "x" * number, row) for number in range(len(texts))]
    none = np.zeros((len(texts), 1), np.float32)
    return Rollout(prompts, texts, none.astype(np.int32), none, none, none[:, 0] > 0)


def scorer_of(function: str, seconds: float, workers: int) -> FunctionScorer:
    return FunctionScorer(PosttrainSection(reward=function, reward_seconds=seconds, reward_workers=workers))


def score(process: RewardProcess, prompt: str, completion: str, row: dict[str, Any]) -> float:
    (reward,) = process.ask("score", prompt, completion, row)["rewards"]
    return reward


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def assert_gone(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_a_reward_gets_prompt_completion_and_row(process: RewardProcess) -> None:
    assert score(process, "abc", "x", {"answer": "x", "more": 0.5}) == 103.5
    assert score(process, "ä\nß", "y", {}) == 3
    assert score(process, "", "platform", {}) == 1
    assert score(process, "", "row", {"when": date(2020, 1, 2), "price": Decimal("1.5")}) == 1


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ("raise", "KeyError: 'no such answer'"),
        ("nan", "the reward is nan"),
        ("huge", r"the reward is 1e\+300"),
        ("long", "^ValueError: two [linestwo ]{100,500}$"),
        ("text", "^reward returns a str, not a number$"),
        ("bool", "^reward returns a bool, not a number$"),
        ("numpy bool", "^reward returns a bool, not a number$"),
        ("colours", r"^ValueError: \\x1b\[31mred$"),
    ],
)
def test_an_error_loses_one_reward(process: RewardProcess, completion: str, why: str) -> None:
    pid = score(process, "", "pid", {})
    with pytest.raises(LostReward, match=why):
        score(process, "", completion, {})
    assert score(process, "", "pid", {}) == pid  # it need not start again


def test_a_process_that_hangs_or_ends_is_started_again(process: RewardProcess) -> None:
    began = time.monotonic()
    with pytest.raises(LostReward, match=r"no response within 1 s \(posttrain.reward_seconds\)"):
        score(process, "", "hang", {})
    assert time.monotonic() - began < 10
    child = int(Path("child").read_text())
    assert score(process, "abc", "x", {}) == 3
    with pytest.raises(LostReward, match="its process has ended"):
        score(process, "", "exit", {})
    assert score(process, "abc", "x", {}) == 3
    assert_gone(child)


@pytest.mark.parametrize(
    ("sent", "times", "why"),
    [
        ("5\n", 1, r"its process sent b'5\\n', which is no response"),
        ("[1]\n", 1, "which is no response"),
        ("[" * 200_000 + "\n", 1, r"sent b'\[\[\[.*\.\.\., which is no response"),
        ('{"rewards": ["x", null]}\n', 1, "which is no response"),
        ('{"rewards": [1.0, 2.0]}\n', 1, "which is no response"),
        ('{"rewards": [NaN]}\n', 1, "which is no response"),
        ('{"rewards": [1e300]}\n', 1, "which is no response"),
        ('{"state": 1}\n', 1, "which is no response"),
        ("\\xff\n", 1, "which is no response"),
        ("[" * (1 << 20), 17, "^the response has more than 16 MiB$"),
    ],
    ids=["number", "list", "brackets", "text", "two", "NaN", "infinite", "object", "bytes", "endless"],
)
def test_what_is_no_answer_is_an_error_of_the_reward(
    process: RewardProcess, sent: str, times: int, why: str
) -> None:
    with pytest.raises(LostReward, match=why):
        score(process, "", "", {"sends": sent, "times": times})
    assert score(process, "abc", "x", {}) == 3


def test_an_answer_that_keeps_coming_has_the_same_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"{}\n")
        with pytest.raises(TimeoutError):
            read_line(ours, time.monotonic() - 1)
        assert read_line(ours, time.monotonic() + 60) == b"{}\n"


def test_what_a_reward_started_ends_with_a_trainer_that_is_killed(function: str, tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    program = f"""
from zerojax.posttrain.reward.process import RewardProcess
process = RewardProcess([{function!r}], 60.0)
process.load()
process.ask("score", "", "hang", {{}})
"""
    env = os.environ | {"TMPDIR": str(tmp_path / "t")}
    with subprocess.Popen([sys.executable, "-c", program], env=env) as trainer:
        child, deadline = Path("child"), time.monotonic() + 60
        while not (child.exists() and child.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        pid = int(child.read_text())
        assert is_alive(pid)
        assert [*(tmp_path / "t").glob("zerojax-reward-*")]
        trainer.kill()
    assert_gone(pid)
    assert not [*(tmp_path / "t").iterdir()]


def test_a_child_that_comes_back_from_the_function_answers_nothing(process: RewardProcess) -> None:
    for number in range(3):
        assert score(process, "x" * number, "fork", {}) == number


def test_a_child_that_lives_on_holds_up_nothing(process: RewardProcess) -> None:
    began = time.monotonic()
    with pytest.raises(LostReward):
        score(process, "", "daemon", {})
    assert time.monotonic() - began < 10
    assert score(process, "abc", "", {}) == 103


def test_a_closed_process_is_gone(process: RewardProcess) -> None:
    pid = int(score(process, "", "pid", {}))
    assert is_alive(pid)
    process.close()
    assert_gone(pid)
    assert pid != os.getpid()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("scores.py", r"name a function, as \"path/to/file.py:function\""),
        ("gone.py:reward", "gone.py does not exist"),
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
        scorer_of(function, 1.0, 2)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_rewards_are_in_the_order_of_the_completions(
    function: str, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [""] * 12
    texts[2], texts[5], texts[9] = "hang", "exit", "raise"
    scorer = scorer_of(function, 1.0, workers)
    for _ in range(2):  # the processes are those of the rollout before
        found, why = scorer.score(rollout(texts, answer="none"))
        lost = np.isin(texts, ("hang", "exit", "raise"))
        np.testing.assert_array_equal(found, np.where(lost, np.nan, np.arange(12)).astype(np.float32))
        assert why == "KeyError: 'no such answer'"
        said = f"zerojax: 3 of 12 rewards are lost, the last one: {why}\n"
        assert said in capsys.readouterr().err
    scorer.close()


def test_no_more_processes_start_than_score_at_once(function: str) -> None:
    scorer = scorer_of(function, 30.0, 100_000)
    pids = [scorer.score(rollout(["pid"]))[0].item() for _ in range(3)]
    assert len({*pids}) == 1
    scorer.close()


def test_several_completions_are_scored_at_once(function: str) -> None:
    scorer, texts = scorer_of(function, 30.0, 3), ["one", "two", "three"]
    found, why = scorer.score(rollout(texts, meets=texts))
    assert (found.tolist(), why) == ([1, 1, 1], "")
    # The end of the run does not wait for rewards.
    began = time.monotonic()
    Timer(0.2, scorer.close).start()
    found, why = scorer.score(rollout(texts, meets=["nobody"]))
    assert np.isnan(found).all()
    assert why == "its process has ended"
    assert time.monotonic() - began < 20


def test_descriptors_that_a_reward_writes_to_and_closes_are_not_those_of_the_exchange(
    process: RewardProcess,
) -> None:
    pid = score(process, "", "pid", {})
    for _ in range(2):
        assert score(process, "", "descriptors", {}) == 7
    assert score(process, "", "pid", {}) == pid


def test_what_a_reward_prints_cannot_control_the_terminal(
    process: RewardProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    assert score(process, "", "print", {}) == 1
    printed, deadline = "", time.monotonic() + 10
    while "printed" not in printed and time.monotonic() < deadline:
        printed += capfd.readouterr().err
        time.sleep(0.01)
    assert "\\x1b]0;title\\x07 printed\n" in printed
    assert "\x1b" not in printed


def test_secrets_of_the_environment_stay_outside(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["HF_TOKEN", "SERVICE_API_KEY", "TOKENIZERS_PARALLELISM"]
    for name in names:
        monkeypatch.setenv(name, "x")
    named = function.replace("reward", "environment")
    for kept, wanted in (((), 4), (("SERVICE_API_KEY",), 6)):
        with closing(RewardProcess([named], 9.0, kept)) as process:
            assert score(process, "", "", {"names": names}) == wanted


def test_several_rewards_are_added_up_by_their_weights(function: str) -> None:
    named = [function, function.replace("reward", "slowly")]
    rewards = RewardFunction(named[0], 0.5, "right"), RewardFunction(named[1], -2.0, "short")
    scorer = FunctionScorer(PosttrainSection(rewards=rewards))
    found, _ = scorer.score(rollout(["", "ab", "raise"], answer="ab"))
    scorer.close()
    np.testing.assert_allclose(found, [0, 0.5 * 101 - 2 * 2, np.nan])
    np.testing.assert_allclose(scorer.parts["right"], [0, 101, np.nan])
    np.testing.assert_allclose(scorer.parts["short"], [0, 2, np.nan])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("several", "several returns a list, not a number"),
        ("table", "table returns a dict, not a number"),
        ("narrow", r"narrow\(prompt, completion, question=...\) cannot be called: .*'answer'"),
    ],
)
def test_what_can_score_nothing_is_refused_before_the_first_rollout(
    function: str, name: str, message: str
) -> None:
    scorer = scorer_of(function.replace("reward", name), 9.0, 1)
    with pytest.raises(ConfigurationError, match=message):
        scorer.check(rollout([""], question="?").prompts[0])


def test_a_reward_that_fails_on_an_empty_completion_is_tried_all_the_same(
    function: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer = scorer_of(function.replace("reward", "fussy"), 9.0, 1)
    scorer.check(rollout([""]).prompts[0])
    assert "an empty completion has no reward: ZeroDivisionError" in capsys.readouterr().err
    assert scorer.score(rollout(["ab"]))[0] == 0.5
    scorer.close()
