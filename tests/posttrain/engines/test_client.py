"""A client of an engine: what it asks for, and which responses it refuses."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_engine import HTTPEngine

from zerojax.generation import Sampling
from zerojax.posttrain.engines.client import Engine, EngineLost, EngineRefused, Request
from zerojax.posttrain.engines.weights import Weights

GREEDY = Sampling(0.0)
DEFAULT = Weights(0, "default", Path())


def counting(text: Sequence[int]) -> np.ndarray:
    """The next token is one higher; the others are less likely by their distance."""
    return -np.abs(np.arange(32) - (text[-1] + 1) % 32).astype(float)


@pytest.fixture
def server() -> Iterator[HTTPEngine]:
    with HTTPEngine(counting) as server:
        yield server


def client(server: HTTPEngine, seconds: float = 20.0) -> Engine:
    return Engine(server.url, seconds, 32)


def test_a_completion_ends_with_its_end_or_at_its_limit(server: HTTPEngine) -> None:
    found = client(server).complete(Request([3], 9, 0), GREEDY, [(7,)], DEFAULT)
    assert found.tokens == [4, 5, 6, 7]
    each = counting([3])
    assert found.log_probs[0] == pytest.approx(each[4] - np.logaddexp.reduce(each))
    assert client(server).complete(Request([3], 2, 0), GREEDY, [(7,)], DEFAULT).tokens == [4, 5]


def test_an_end_of_several_tokens_is_not_one_that_only_ends_alike(server: HTTPEngine) -> None:
    ends = [(9, 6), (7, 8)]
    found = client(server).complete(Request([3], 9, 0), GREEDY, ends, DEFAULT)
    assert found.tokens == [4, 5, 6, 7, 8]
    assert len(found.log_probs) == 5
    assert server.served == [[3], [3, 4, 5, 6]]  # it went on after the 6


def test_random_bits_follow_from_the_seed(server: HTTPEngine) -> None:
    drawn = [
        client(server).complete(Request([3], 9, seed), Sampling(2.0), [(31,)], DEFAULT) for seed in (5, 5, 6)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_the_defaults_of_a_model_are_overridden(server: HTTPEngine) -> None:
    asked = []

    def respond(path: str, body: Any) -> Any:
        asked.append(body)
        return server.answer(path, body)

    server.respond = respond
    client(server).complete(Request([3], 2, 0), Sampling(0.5), [(7,)], DEFAULT)
    how = asked[0]["sampling_params"]
    assert asked[0]["cache_salt"] == "default"
    assert (how["temperature"], how["top_p"], how["top_k"], how["repetition_penalty"]) == (0.5, 1.0, 0, 1.0)
    assert how["ignore_eos"] is True


def test_weights_have_their_name_after_they_are_loaded(server: HTTPEngine, tmp_path: Path) -> None:
    weights = Weights(7, "step-7-abc", tmp_path / "step-7-abc")
    with pytest.raises(EngineLost, match=r"has the weights {'default'}, not step-7-abc"):
        client(server).complete(Request([3], 2, 0), GREEDY, [], weights)
    client(server).load(weights)
    assert server.loaded == ["step-7-abc"]
    assert client(server).version() == "step-7-abc"
    client(server).complete(Request([3], 2, 0), GREEDY, [], weights)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], Any]:
    """A response whose only choice is changed."""

    def fault(response: dict[str, Any]) -> Any:
        change(response["choices"][0])
        return response

    return fault


FAULTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda _: (200, b"<html>"),
    "a list": lambda _: (200, b"[]"),
    "not UTF-8": lambda _: (200, b'{"a": "\xff"}'),
    "NaN": lambda _: (200, b'{"choices": NaN}'),
    "no choice": lambda response: response | {"choices": []},
    "no version": changed(lambda one: one.pop("weight_versions")),
    "a gap of versions": changed(lambda one: one["weight_versions"][0].update(start=1)),
    "versions of fewer tokens": changed(lambda one: one["weight_versions"][0].update(end=1)),
    "no log-probabilities": changed(lambda one: one.update(logprobs=None)),
    "fewer log-probabilities": changed(lambda one: one["logprobs"]["content"].pop()),
    "a positive log-probability": changed(lambda one: one["logprobs"]["content"][0].update(logprob=0.5)),
    "a text as log-probability": changed(lambda one: one["logprobs"]["content"][0].update(logprob="-1")),
    "other tokens": changed(lambda one: one["token_ids"].reverse()),
    "a token beyond the vocabulary": changed(
        lambda one: (one.update(token_ids=[4, 99]), one["logprobs"]["content"][1].update(token_id=99))
    ),
    "text as tokens": changed(
        lambda one: (one.update(token_ids=["4", 5]), one["logprobs"]["content"][0].update(token_id="4"))
    ),
    "too few tokens": changed(
        lambda one: (
            one["token_ids"].pop(),
            one["logprobs"]["content"].pop(),
            one["weight_versions"][0].update(end=1),
        )
    ),
    "a refusal": lambda _: (403, b'{"error": "Scale-out endpoints are disabled"}'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_responses_are_refused(server: HTTPEngine, fault: str) -> None:
    server.respond = lambda path, body: FAULTS[fault](server.answer(path, body))
    with pytest.raises(EngineRefused):
        client(server).complete(Request([3], 2, 0), GREEDY, [], DEFAULT)


LOST: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a broken connection": lambda _: None,
    "an error of the server": lambda _: (500, b"EngineCore encountered an issue"),
    "an aborted request": changed(lambda one: one.update(finish_reason="abort")),
    "two versions": changed(
        lambda one: one.update(
            weight_versions=[
                {"version": "default", "start": 0, "end": 1},
                {"version": "step-1", "start": 1, "end": 2},
            ]
        )
    ),
}


@pytest.mark.parametrize("fault", LOST)
def test_an_engine_without_a_completion_is_lost_but_not_refused(server: HTTPEngine, fault: str) -> None:
    server.respond = lambda path, body: LOST[fault](server.answer(path, body))
    with pytest.raises(EngineLost) as error:
        client(server).complete(Request([3], 2, 0), GREEDY, [], DEFAULT)
    assert not isinstance(error.value, EngineRefused)


def test_a_dead_or_slow_engine_is_lost(server: HTTPEngine) -> None:
    slow = client(server, seconds=0.2)
    server.respond = lambda path, body: time.sleep(1.0)
    with pytest.raises(EngineLost, match="does not respond: TimeoutError"):
        slow.version()
    server.die()
    with pytest.raises(EngineLost, match="does not respond: ConnectionRefusedError"):
        slow.version()


def test_an_engine_is_tried_before_it_is_used(server: HTTPEngine) -> None:
    client(server).check(64, 1.0, tied=False, fp8=False)
    client(server).check(64, 0.5, tied=False, fp8=False)
    with pytest.raises(EngineRefused, match="room for 64 tokens, but rows have up to 65"):
        client(server).check(65, 1.0, tied=False, fp8=False)
    plain = server.answer

    def raw(path: str, body: Any) -> Any:
        """As an engine whose log-probabilities do not know the temperature."""
        if body is not None:
            body["sampling_params"]["temperature"] = 1.0
        return plain(path, body)

    server.respond = raw
    client(server).check(64, 1.0, tied=False, fp8=False)
    with pytest.raises(EngineRefused, match="--logprobs-mode processed_logprobs"):
        client(server).check(64, 0.5, tied=False, fp8=False)
    server.respond = lambda path, body: {"data": []} if path == "/v1/models" else plain(path, body)
    with pytest.raises(EngineRefused, match="lists no model"):
        client(server).check(64, 1.0, tied=False, fp8=False)


def test_a_tied_projection_needs_an_engine_on_a_gpu(server: HTTPEngine) -> None:
    client(server).check(64, 1.0, tied=True, fp8=False)
    server.device = "cpu"
    client(server).check(64, 1.0, tied=False, fp8=False)
    with pytest.raises(EngineRefused, match=r"set model\.tied = false"):
        client(server).check(64, 1.0, tied=True, fp8=False)


@pytest.mark.parametrize(("own", "fp8", "sent"), [("fp8", False, "full"), (None, True, "fp8-blocks")])
def test_an_engine_must_serve_the_format_that_it_gets(
    server: HTTPEngine, own: str | None, fp8: bool, sent: str
) -> None:
    server.quantization = own
    client(server).check(64, 1.0, tied=False, fp8=not fp8)
    with pytest.raises(EngineRefused, match=f'quantization {own}, but posttrain.engine_weights is "{sent}"'):
        client(server).check(64, 1.0, tied=False, fp8=fp8)
