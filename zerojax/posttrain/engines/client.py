"""A client of one inference engine: vLLM's interface of tokens over HTTP, whose responses are read strictly.

The engine must be started with ``--enable-scale-out`` and the environment variable
``VLLM_SERVER_DEV_MODE=1`` (docs/posttrain.md).
"""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from zerojax.errors import error_line
from zerojax.generation import Sampling
from zerojax.multihost.peers.messages import keep_alive
from zerojax.posttrain.engines.weights import Weights
from zerojax.validation.untrusted import parse_json, printable, short

_CONNECT_SECONDS = 10.0
_MAX_BYTES = 1 << 26  # of a response
_ROUNDING = 1e-3  # a log-probability may exceed 0 by this
_PLAIN = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0},
    **{"ignore_eos": True, "detokenize": False, "logprobs": 0},
}
"""Sampling parameters in place of the engine's defaults, which may come with the model."""


class EngineLost(Exception):
    """An engine gave no usable response. The message says why."""


class EngineRefused(EngineLost):
    """An engine responded, but not as vLLM with the required options does."""


class Request(NamedTuple):
    """A prompt, the most new tokens, and the seed of its random bits."""

    prompt: Sequence[int]
    limit: int
    seed: int


class Completion(NamedTuple):
    """New tokens, including the end, and the log-probability of each."""

    tokens: list[int]
    log_probs: list[float]


@dataclass(frozen=True)
class Engine:
    """An engine.

    Attributes:
        url: "http://host:port".
        seconds: time limit of a response.
        vocabulary: number of the model's tokens.
    """

    url: str
    seconds: float
    vocabulary: int

    def complete(
        self, request: Request, how: Sampling, stop: Sequence[tuple[int, ...]], weights: Weights
    ) -> Completion:
        """Complete a prompt with this version of the weights.

        The engine stops at a token. For an end of several tokens it stops at their last one, and goes on if
        the others are not there.

        Raises:
            EngineLost: there is no completion by these weights.
        """
        tokens, log_probs = [], []
        while True:
            left, seed = request.limit - len(tokens), (request.seed + len(tokens)) % 2**31
            found = self._generate([*request.prompt, *tokens], left, seed, how, stop, weights)
            tokens, log_probs = tokens + found.tokens, log_probs + found.log_probs
            if len(tokens) == request.limit or any(tuple(tokens[-len(end) :]) == end for end in stop):
                return Completion(tokens, log_probs)

    def version(self) -> str:
        """The name of the engine's weights: the one of its last ``load``, or "default" after its start.

        Raises:
            EngineLost: there is no response.
            EngineRefused: the response names no version.
        """
        name = self._ask("/weight_info").get("weight_version")
        if not isinstance(name, str):
            raise EngineRefused(f"{self.url} names no version of its weights, but {short(name)}")
        return name

    def load(self, weights: Weights) -> None:
        """Load weights. The engine gets their name once it has all of them. Errors as ``version``."""
        path = str(weights.folder)
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        self._ask("/update_weight_version", {"new_version": weights.name})

    def check(self, longest: int, temperature: float, tied: bool, fp8: bool) -> None:
        """Try the engine.

        Args:
            longest: the most tokens of a row.
            temperature: of the rollouts.
            tied: whether the model's output projection is its token embedding.
            fp8: whether it will get weights in fp8.

        Raises:
            EngineRefused: the engine cannot be used.
            EngineLost: it does not respond.
        """
        match self._ask("/v1/models"):
            case {"data": [{"max_model_len": int(room)}, *_]} if room >= longest:
                name = self.version()
            case {"data": [{"max_model_len": int(room)}, *_]}:
                raise EngineRefused(
                    f"{self.url} has room for {room} tokens, but rows have up to {longest}: start it with "
                    f"--max-model-len {longest} or more"
                )
            case other:
                raise EngineRefused(f"{self.url}/v1/models lists no model: {short(other)}")
        # On CPUs with AMX vLLM 0.32 dies in fp8 if its first prompt has less than five tokens.
        prompt, weights = [0] * min(8, longest - 1), Weights(0, name, Path())
        tried = [
            self._generate(prompt, 1, 0, Sampling(t), [], weights, likeliest=True).log_probs
            for t in {1.0, temperature}
        ]
        if len(tried) == 2 and tried[0] == tried[1]:
            raise EngineRefused(
                f"{self.url} returns log-probabilities from before the division by posttrain.temperature = "
                f"{temperature}: start it with --logprobs-mode processed_logprobs"
            )
        # On CPUs vLLM packs the projection, and packs it again only if its own name is loaded.
        match self._ask("/server_info?config_format=json"):
            case {"vllm_config": {"device_config": {"device": "cpu"}}} if tied:
                raise EngineRefused(
                    f"{self.url} computes on CPUs, where vLLM 0.32 keeps the first output projection if it "
                    "is tied to the embedding: set model.tied = false, or use an engine on a GPU"
                )
            # vLLM would load full weights as fp8 codes, and keep its scales.
            case {"vllm_config": {"model_config": {"quantization": str() | None as own}}} if (
                own == "fp8"
            ) != fp8:
                raise EngineRefused(
                    f"{self.url} serves a model with quantization {own}, but posttrain.engine_weights is "
                    f'"{"fp8-blocks" if fp8 else "full"}": change it, or start the engine with another export'
                )
            case _:
                pass

    def _generate(
        self,
        prompt: Sequence[int],
        limit: int,
        seed: int,
        how: Sampling,
        stop: Sequence[tuple[int, ...]],
        weights: Weights,
        *,
        likeliest: bool = False,
    ) -> Completion:
        """Ask once. With ``likeliest`` the log-probability is the one of the likeliest token."""
        ends = sorted({end[-1] for end in stop})
        sampling = {"temperature": how.temperature, "max_tokens": limit, "seed": seed, "stop_token_ids": ends}
        found = self._ask(
            "/inference/v1/generate",
            {
                "token_ids": [*map(int, prompt)],
                "sampling_params": _PLAIN | sampling | {"logprobs": int(likeliest)},
                "cache_salt": weights.name,  # cached keys of other weights must not be used
            },
        )
        tokens, log_probs, versions = _read(found, likeliest)
        if versions != {weights.name}:
            raise EngineLost(f"{self.url} has the weights {short(versions)}, not {weights.name}")
        if (
            not 1 <= len(tokens) <= limit
            or not all(0 <= token < self.vocabulary for token in tokens)
            or any(token in ends for token in tokens[:-1])
            or (len(tokens) < limit and tokens[-1] not in ends)
        ):
            raise EngineRefused(
                f"{self.url} completed a prompt by {short(tokens)}, against its limit or the ends asked for"
            )
        return Completion(tokens, log_probs)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object in the response to a request.

        Raises:
            EngineLost: there is no response.
            EngineRefused: the response has another status or content.
        """
        where = urlsplit(self.url)
        kind = HTTPSConnection if where.scheme == "https" else HTTPConnection
        text = None if body is None else json.dumps(body)
        try:
            with closing(kind(where.hostname or "", where.port, timeout=_CONNECT_SECONDS)) as connection:
                connection.connect()
                connection.sock.settimeout(self.seconds)
                keep_alive(connection.sock)
                headers = {"Content-Type": "application/json", "Connection": "close"}
                connection.request("GET" if text is None else "POST", path, text, headers)
                response = connection.getresponse()
                found = response.read(_MAX_BYTES + 1)
        except (OSError, HTTPException) as error:
            raise EngineLost(f"{self.url} does not respond: {error_line(error)}") from error
        if response.status != 200:
            why = printable(found[:200].decode(errors="replace"))
            lost = EngineLost if response.status >= 500 else EngineRefused
            raise lost(f"{self.url}{path} responds with HTTP status {response.status}: {why}")
        try:
            value = parse_json(found.decode()) if len(found) <= _MAX_BYTES else None
        except ValueError as error:
            raise EngineRefused(f"{self.url}{path}: {error}") from error
        if not isinstance(value, dict):
            raise EngineRefused(f"{self.url}{path} responds with {short(value)}, which is no JSON object")
        return value


def _read(response: dict[str, Any], likeliest: bool) -> tuple[list[int], list[float], set[str]]:
    """Tokens, log-probabilities and versions of the weights in a response.

    Raises:
        EngineLost: the engine ended the request early.
        EngineRefused: the response has another layout.
    """
    match response:
        case {"choices": [{"finish_reason": "abort"}]}:
            raise EngineLost("the engine aborted a request")
        case {"choices": [{"token_ids": list(tokens), "weight_versions": list(spans), "logprobs": logged}]}:
            pass
        case _:
            raise EngineRefused(f"an engine sent {short(response)}, which is no completion with a version")
    try:
        entries = logged["content"]
        chosen = [entry["top_logprobs"][-1] if likeliest else entry for entry in entries]
        log_probs, ids = [one["logprob"] for one in chosen], [entry["token_id"] for entry in entries]
        ends = [span["end"] for span in spans]
        starts, versions = [span["start"] for span in spans], {span["version"] for span in spans}
    except (LookupError, TypeError):
        raise EngineRefused(f"an engine sent no log-probabilities or versions: {short(response)}") from None
    if (
        ids != tokens
        or not all(type(token) is int for token in tokens)
        or not all(type(x) is float and x <= _ROUNDING for x in log_probs)
        or starts != [0, *ends[:-1]]
        or ends[-1:] != [len(tokens)]
    ):
        raise EngineRefused(
            f"an engine sent tokens, log-probabilities and versions that do not fit: {short(response)}"
        )
    return tokens, log_probs, versions
