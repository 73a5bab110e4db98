"""A backend of vLLM's weight transfer that changes the weights in its worker's memory. Needs vLLM 0.32.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --worker-extension-cls receiver.in_vllm.Extension \
        --weight-transfer-config '{"backend": "zerojax"}'

The worker listens for a training job once vLLM's /init_weight_transfer_engine has been called. Each complete
version is then applied within vLLM's own update: /pause, /start_weight_update, /update_weights,
/finish_weight_update, /resume.
"""

import json
import os
import sys
import threading
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.utils as layers
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from .ends import TOKEN, Receiver
from .manifest import Manifest
from .on_device import DeviceReplica
from .patches import FULL, PatchError

NAME = "zerojax"
"""The backend's name in vLLM's --weight-transfer-config."""

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Models whose weights vLLM keeps as the files have them, some joined along their rows."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PAUSE, _SECONDS = 1.0, 600.0


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The body of /init_weight_transfer_engine.

    Attributes:
        listen: HOST:PORT for the training job.
        server: URL of this vLLM, whose updates the worker then drives; "" if something else calls them.
        mode: of /pause. With "wait", requests finish with the weights with which they began.
    """

    listen: str
    server: str = ""
    mode: str = "wait"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The body of /update_weights.

    Attributes:
        version: the version to apply, which may still be arriving.
        seconds: time for it to arrive.
    """

    version: int
    seconds: float = 60.0


class Listening:
    """Receives versions, and writes each while the worker waits in ``hold``, between two steps of the model.

    Args:
        model: vLLM's.
        info: where to listen.
    """

    def __init__(self, model: torch.nn.Module, info: InitInfo) -> None:
        self._model, self._info = model, info
        self._turn = threading.Condition()
        self._holding, self._written, self._closed = False, FULL, False
        replica, token = DeviceReplica(self._begin, self._paused), os.environ.get(TOKEN, "").strip()
        self._receiver = Receiver(replica, info.listen, token)

    def hold(self, version: int, seconds: float) -> bool:
        """Let versions be written until ``version`` has been; returns False after ``seconds``."""
        with self._turn:
            self._holding = True
            self._turn.notify_all()
            try:
                return self._turn.wait_for(lambda: self._written >= version, seconds)
            finally:
                self._holding = False

    def close(self) -> None:
        """Stop listening. A version that waits is not written."""
        self._receiver.close()
        with self._turn:
            self._closed = True
            self._turn.notify_all()

    def _begin(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        found = tensors_of(self._model, manifest)
        self._written = FULL  # versions of a new job may be smaller
        return found

    @contextmanager
    def _paused(self, version: int) -> Generator[None]:
        driver = threading.Thread(target=self._drive, args=(version,), daemon=True)
        if self._info.server:
            driver.start()
        with self._turn:
            self._turn.wait_for(lambda: self._holding or self._closed)
            if self._closed:
                raise PatchError("vLLM has ended the transfer")
            yield  # ``hold`` cannot return, because it needs the lock
            self._written = version
            self._turn.notify_all()
        if self._info.server:
            driver.join()

    def _drive(self, version: int) -> None:
        """Run vLLM's update until it has succeeded."""
        while not self._closed:
            try:
                self._post(f"/pause?mode={self._info.mode}")
                self._post("/start_weight_update")
                self._post("/update_weights", {"update_info": {"version": version}})
                self._post("/finish_weight_update", {"weight_version": str(version)})
                self._post("/resume")
                return
            except OSError as error:
                print(f"vLLM has not applied version {version}: {error}", file=sys.stderr, flush=True)
                time.sleep(_PAUSE)
                with suppress(OSError):
                    self._post("/finish_weight_update")  # of an update that was interrupted

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        content = json.dumps(body or {}).encode()
        request = urllib.request.Request(
            self._info.server + path, content, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_SECONDS) as response:
            response.read()


class Weights(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The weights of one worker, as a backend of vLLM's weight transfer."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False
    _listening: Listening | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Listen for a training job.

        Raises:
            ValueError: the model is in several workers, or the worker listens already.
        """
        if self.parallel_config.world_size > 1:
            raise ValueError("the model is in several workers: use a mirror and reload_weights instead")
        if self._listening is not None:
            raise ValueError("the worker listens already: call /shutdown_weight_transfer_engine first")
        self._listening = Listening(self.model, init_info)

    def start_weight_update(self) -> None:
        """Nothing changes before ``receive_weights``."""

    def finish_weight_update(self) -> None:
        """Everything was changed in ``receive_weights``."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As in the base class, which needs an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Wait until a version has been written.

        Raises:
            ValueError: the worker does not listen.
            TimeoutError: the version has not arrived. The weights are unchanged.
        """
        if self._listening is None:
            raise ValueError("call /init_weight_transfer_engine first")
        if not self._listening.hold(update_info.version, update_info.seconds):
            raise TimeoutError(f"version {update_info.version} has not arrived")

    def shutdown(self) -> None:
        """Stop listening."""
        if self._listening is not None:
            self._listening.close()
            self._listening = None


def tensors_of(model: torch.nn.Module, manifest: Manifest) -> dict[str, torch.Tensor]:
    """The parts of vLLM's parameters that are the tensors of a manifest.

    Raises:
        PatchError: vLLM keeps this model in another form, or the job sends another model.
    """
    if type(model).__name__ not in ARCHITECTURES:
        raise PatchError(
            f"{type(model).__name__} is none of {', '.join(ARCHITECTURES)}: use a mirror and reload_weights"
        )
    joined = {part: (whole, parts) for whole, parts in model.packed_modules_mapping.items() for part in parts}
    parameters = {name: x.data for name, x in model.named_parameters()}
    shapes = {name: shape for name, _, shape in manifest.tensors}
    found, used = dict[str, torch.Tensor](), dict[str, int]()
    for name, dtype, shape in manifest.tensors:
        if dtype not in _DTYPES:
            raise PatchError(
                f"vLLM may have {name}, {dtype}, in another order: use a mirror and reload_weights"
            )
        module = name.rpartition(".")[0].rpartition(".")[2]
        whole, parts = joined.get(module, (module, [module]))
        own = name.replace(f".{module}.", f".{whole}.")
        before = [shapes.get(name.replace(f".{module}.", f".{one}."), (0,)) for one in parts]
        first = sum(one[0] for one in before[: parts.index(module)])
        x = parameters.get(own, torch.empty(0))
        if x.dtype != _DTYPES.get(dtype) or not x.is_contiguous() or x.shape[1:] != shape[1:]:
            raise PatchError(f"the job sends {name}, {dtype} {shape}, but vLLM has {x.dtype} {[*x.shape]}")
        found[name] = x[first : first + shape[0]]
        used[own] = used.get(own, 0) + found[name].shape[0]
        if found[name].shape != shape:
            raise PatchError(f"{own} of vLLM has {x.shape[0]} rows, too few for {name}")
    # vLLM pads a vocabulary.
    for name, x in parameters.items():
        rows = used.get(name, 0)
        if rows < len(x) and not (rows and ("embed_tokens" in name or "lm_head" in name)):
            raise PatchError(f"the job sends {rows} of {len(x)} rows of {name}")
    return found


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Compute with a layer's own weights. vLLM would pack a copy of them, which patches cannot change."""
    layer.cpu_linear = torch.nn.functional.linear


class Extension:
    """Nothing. vLLM imports this module for it in each worker, which registers the backend."""


WeightTransferEngineFactory.register_engine(NAME, Weights)
if current_platform.is_cpu():
    layers.dispatch_cpu_unquantized_gemm = _keep_plain
    LinearBase._cpu_skip_gemm_dispatch = True  # the same for fp8
    _DTYPES["F8_E4M3"] = torch.float8_e4m3fn  # GPUs' kernels may store codes in another order
