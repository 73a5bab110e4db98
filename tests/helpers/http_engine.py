"""An engine with vLLM's interface of tokens, in this process. Its model is a function, or a loaded GPT."""

import json
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import zerojax
from zerojax.interop.huggingface import ModelReader
from zerojax.run.build import RunSetup
from zerojax.run.config import MeshSection, RunConfig

Model = Callable[[Sequence[int]], np.ndarray]
"""Logits of the token that follows a text."""


class HTTPEngine:
    """An engine; a context manager.

    Attributes:
        url: where it listens.
        version: of its weights.
        loaded: the names of the folders that it loaded.
        served: the prompts that it completed.
        device: the kind that it says it computes on.
        quantization: the one that it says its model has.
        respond: makes the response to a path and a body; tests put faults around it. A response of None
            breaks the connection, a pair is a status and bytes.
    """

    def __init__(self, model: Model, load: Callable[[Path], Model] | None = None, room: int = 64) -> None:
        self._model, self._load, self._room = model, load or (lambda _: model), room
        self._first = model
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self.version, self.loaded, self.served = "default", list[str](), list[list[int]]()
        self.device = "cuda"
        self.quantization: str | None = None
        self.respond: Callable[[str, Any], Any] = self.answer
        self._server = self._listen(0)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """Stop listening, and break all connections."""
        self._server.shutdown()
        self._server.server_close()
        for one in list(self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def restart(self) -> None:
        """Listen again, with the weights of the start."""
        self.version, self._model = "default", self._first
        self._server = self._listen(int(self.url.rpartition(":")[2]))

    def after(self, count: int, what: Callable[[], object]) -> None:
        """Call ``what`` in place of the response to a request, after ``count`` requests for completions.

        The client then gets the result of ``what``; None breaks the connection.
        """
        lock, asked = threading.Lock(), iter(range(count))

        def respond(path: str, body: Any) -> Any:
            if path == "/inference/v1/generate":
                with lock:
                    last = self.respond is respond and next(asked, None) is None
                    if last:
                        self.respond = self.answer
                if last:
                    return what()
            return self.answer(path, body)

        self.respond = respond

    def answer(self, path: str, body: Any) -> Any:
        """The response of an engine without faults."""
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "policy", "max_model_len": self._room}]}
        if path == "/server_info?config_format=json":
            own = {
                "device_config": {"device": self.device},
                "model_config": {"quantization": self.quantization},
            }
            return {"vllm_config": own}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            folder = Path(body["kwargs"]["weights_path"])
            with self._lock:
                self._model = self._load(folder)
            self.loaded.append(folder.name)
            return {"results": [None]}
        if path == "/update_weight_version":
            self.version = body["new_version"]
            return {"success": True}
        assert path == "/inference/v1/generate", path
        with self._lock:
            return self._complete(body["token_ids"], body["sampling_params"])

    def _complete(self, prompt: list[int], how: dict[str, Any]) -> Any:
        self.served.append(prompt)
        bits, tokens, content = np.random.default_rng(how["seed"]), [], []
        while len(tokens) < how["max_tokens"] and not (tokens and tokens[-1] in how["stop_token_ids"]):
            logits = np.asarray(self._model([*prompt, *tokens]), np.float64) / (how["temperature"] or 1)
            log_probs = logits - np.logaddexp.reduce(logits)
            noise = bits.gumbel(size=logits.shape) if how["temperature"] else 0
            likeliest, token = int(log_probs.argmax()), int((log_probs + noise).argmax())
            tokens.append(token)
            ranked = dict.fromkeys([token, likeliest][: 1 + how["logprobs"]])
            top = [{"token_id": one, "logprob": float(log_probs[one])} for one in ranked]
            content.append(top[0] | {"rank": 1, "top_logprobs": top})
        choice = {
            "index": 0,
            "finish_reason": "stop" if tokens[-1] in how["stop_token_ids"] else "length",
            "token_ids": tokens,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
            "logprobs": {"content": content},
        }
        return {"request_id": "r", "choices": [choice]}

    def _listen(self, port: int) -> ThreadingHTTPServer:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond(None)

            def do_POST(self) -> None:
                self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _respond(self, body: Any) -> None:
                found = engine.respond(self.path, body)
                status, content = found if isinstance(found, tuple) else (200, json.dumps(found).encode())
                if found is None:
                    with suppress(OSError):
                        self.connection.shutdown(socket.SHUT_RDWR)
                    return
                with suppress(OSError):  # the client may be gone
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def setup(self) -> None:
                super().setup()
                engine._connections.add(self.connection)

            def finish(self) -> None:
                engine._connections.discard(self.connection)
                with suppress(OSError):
                    super().finish()

            def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        server.daemon_threads = True
        server.socket.listen(256)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


def loader(config: RunConfig) -> Callable[[Path], Model]:
    """Loads a run's exported weights into a model on one device, which reads a text at once."""
    alone = replace(config, mesh=MeshSection(nodes=1, local=1))
    length = config.model.max_seq_len

    def load(folder: Path) -> Model:
        state = ModelReader().weights(folder, RunSetup(alone).initial_state())
        graph, weights = nnx.split(zerojax.gather_model(state))

        @jax.jit
        def logits(weights: Any, tokens: jax.Array, last: jax.Array) -> jax.Array:
            return nnx.merge(graph, weights)(tokens)[0, last]

        def model(text: Sequence[int]) -> np.ndarray:
            padded = np.zeros((1, length), np.int32)
            padded[0, : len(text)] = text
            return np.asarray(logits(weights, padded, jnp.int32(len(text) - 1)))

        return model

    return load
