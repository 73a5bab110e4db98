"""Engines that share requests: dead ones, restarted ones, and none at all."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_engine import HTTPEngine

from zerojax.errors import RunError
from zerojax.generation import Sampling
from zerojax.posttrain.engines import pool as pool_module
from zerojax.posttrain.engines.client import Completion, Engine, Request
from zerojax.posttrain.engines.pool import EngineGenerator, EnginePool
from zerojax.posttrain.engines.weights import Weights
from zerojax.posttrain.rollout.generator import Turn

WEIGHTS = Weights(4, "step-4-ab", Path("weights/step-4-ab"))
REQUESTS = [Request([row], 4, row) for row in range(12)]


def model(step: int) -> Callable[[Any], np.ndarray]:
    """The next token is ``step`` higher."""
    return lambda text: -np.abs(np.arange(100) - (text[-1] + step) % 100).astype(float)


EXPECTED = [[(row + 4 * k) % 100 for k in range(1, 5)] for row in range(12)]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HTTPEngine]]:
    """Two engines, whose tokens show which weights they have."""
    monkeypatch.setattr(pool_module, "_RETRY_SECONDS", 0.1)

    def load(folder: Path) -> Any:
        return model(int(folder.name.split("-")[1]))

    with HTTPEngine(model(0), load) as first, HTTPEngine(model(0), load) as second:
        yield [first, second]


def clients(engines: list[HTTPEngine]) -> EnginePool:
    return EnginePool([Engine(one.url, 20.0, 100) for one in engines], lambda *_: "")


def complete(pool: EnginePool, stopping: Callable[[], bool] = lambda: False) -> list[Completion | None]:
    return pool.complete(REQUESTS, Sampling(0.0), [], WEIGHTS, stopping)


def tokens(found: list[Completion | None]) -> list[list[int] | None]:
    return [None if one is None else one.tokens for one in found]


def test_both_engines_complete_with_the_weights(two: list[HTTPEngine]) -> None:
    """Neither completes a prompt before the other is asked for one."""
    asked = [threading.Event(), threading.Event()]

    def meet(index: int, path: str, body: Any) -> Any:
        if path == "/inference/v1/generate":
            asked[index].set()
            assert asked[1 - index].wait(60)
        return two[index].answer(path, body)

    for index, one in enumerate(two):
        one.respond = partial(meet, index)
    pool = clients(two)
    assert tokens(complete(pool)) == EXPECTED
    assert [one.loaded for one in two] == [["step-4-ab"]] * 2
    assert all(one.served for one in two)
    complete(pool)
    assert [one.loaded for one in two] == [["step-4-ab"]] * 2, "they were loaded twice"


def test_the_prompts_of_a_dead_engine_go_to_another(two: list[HTTPEngine]) -> None:
    two[0].after(2, lambda: threading.Thread(target=two[0].die).start())
    pool = clients(two)
    assert tokens(complete(pool)) == EXPECTED
    assert pool.nothing_works == ""
    assert tokens(complete(pool)) == EXPECTED


def test_a_restarted_engine_gets_the_weights_before_its_completions_count(two: list[HTTPEngine]) -> None:
    def restart() -> None:
        two[0].die()
        two[0].restart()

    two[0].after(3, lambda: threading.Thread(target=restart).start())
    assert tokens(complete(clients(two[:1]))) == EXPECTED
    assert two[0].loaded == ["step-4-ab"] * 2


def test_a_completion_by_other_weights_is_made_again(two: list[HTTPEngine]) -> None:
    """Somebody else gives the engine older weights while it works."""

    def replace() -> None:
        two[0].answer("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "step-3"}})
        two[0].version = "step-3"

    two[0].after(3, replace)
    assert tokens(complete(clients(two[:1]))) == EXPECTED
    assert two[0].loaded[:2] == ["step-4-ab", "step-3"]
    assert two[0].loaded[-1] == "step-4-ab"


def test_without_engines_it_waits_until_one_is_back(two: list[HTTPEngine]) -> None:
    two[0].die()
    pool, found = clients(two[:1]), []
    thread = threading.Thread(target=lambda: found.extend(complete(pool)))
    thread.start()
    deadline = time.monotonic() + 20
    while not pool.nothing_works and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "does not respond: ConnectionRefusedError" in pool.nothing_works
    assert not found
    two[0].restart()
    thread.join(20)
    assert tokens(found) == EXPECTED
    assert pool.nothing_works == ""


def test_an_engine_waits_until_its_host_has_the_weights(two: list[HTTPEngine]) -> None:
    engines, asked = [Engine(one.url, 20.0, 100) for one in two], [0, 0]

    def arrive(engine: int, weights: Weights, seconds: float) -> str:
        assert weights == WEIGHTS
        asked[engine] += 1
        return "" if engine == 1 else "still on their way"

    pool = EnginePool(engines, arrive)
    assert tokens(complete(pool)) == EXPECTED
    assert asked[0]
    assert asked[1] == 1
    assert (two[0].loaded, two[1].loaded) == ([], ["step-4-ab"])


def test_a_stop_does_not_wait_for_engines(two: list[HTTPEngine]) -> None:
    two[0].die()
    assert complete(clients(two[:1]), lambda: True) == [None] * 12


def test_a_prompt_that_engines_refuse_ends_the_run(two: list[HTTPEngine]) -> None:
    plain = two[0].answer
    two[0].respond = lambda path, body: (400, b"no") if "generate" in path else plain(path, body)
    with pytest.raises(RunError, match=r"refuse to complete a prompt.*HTTP status 400: no"):
        complete(clients(two[:1]))


def test_rows_have_their_own_seeds_and_limits(two: list[HTTPEngine]) -> None:
    generator = EngineGenerator(clients(two), WEIGHTS)
    assert generator.version == 4
    turn = Turn([[3]] * 4, [3, 0, 3, 2], Sampling(30.0), [(99,)], seed=5, width=3)
    found = generator.complete(turn, lambda: False)
    assert found.lengths.tolist() == [3, 0, 3, 2]
    assert found.tokens[0].tolist() != found.tokens[2].tolist()
    assert not found.tokens[1].any()
    assert found.log_probs[3, 2] == 0
    assert (found.log_probs[0] < 0).all()
    again = generator.complete(turn, lambda: False)
    np.testing.assert_array_equal(again.tokens, found.tokens)
