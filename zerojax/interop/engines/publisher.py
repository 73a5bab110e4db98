"""Sends a state's weights to engines: every process sends its own devices' shards to every receiver."""

import secrets
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxlib.xla_client import Device

from zerojax.errors import ConfigurationError, RunError
from zerojax.interop.engines.encoder import (
    Compared,
    compare,
    finished_patches,
    full_patch,
    rounded,
    start_packing,
)
from zerojax.interop.engines.layout import Key, Part, arrays_of, files_of, pieces_of
from zerojax.interop.engines.receiver.ends import Feed
from zerojax.interop.engines.receiver.mirror import Log
from zerojax.interop.engines.receiver.patches import FULL, Patch
from zerojax.interop.engines.scales import codes_of, exponents_of, scales_of
from zerojax.interop.huggingface.exporting import check_quantizable, plan_export
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.multihost.background import Worker
from zerojax.run.config import RunConfig
from zerojax.run.run_dir import RunFolder
from zerojax.train.state import TrainState

_QUEUED = 2
"""Most versions that are compared on the devices and not encoded yet."""


class _Version(NamedTuple):
    number: int
    shards: list[Compared]


class Publisher:
    """Keeps receivers at the versions of a state that ``publish`` gets.

    The first version is sent in full, later ones as patches. A receiver that has missed versions gets their
    patches, or everything. All processes create it and call ``publish`` together, but nothing waits for
    another process.

    Args:
        state: of the run, filled or abstract.
        config: the run's settings.
        folder: the run's folder, for the tokenizer.
        receivers: HOST:PORT of each.
        token: the job's secret.
        dtype: of the engine's weights: bfloat16, float16 or float32; None takes the imported model's dtype.
        how: the quantization of the linear layers; None for none.
        flows: TCP connections from this process to each receiver.

    Raises:
        ConfigurationError: no family of Hugging Face fits the model, it has frozen weights, or it cannot be
            quantized.
    """

    def __init__(
        self,
        state: TrainState,
        config: RunConfig,
        folder: RunFolder,
        receivers: Sequence[str],
        *,
        token: str,
        dtype: str | None = "bfloat16",
        how: FP8Blocks | None = None,
        flows: int = 4,
    ) -> None:
        target = plan_export(state, config, folder, dtype)
        if how is not None:
            check_quantizable(state, target, how)
        # Receivers prefer a later session, which is the greater string.
        self.session, files = run_on_process_zero(
            lambda: [f"{time.time_ns():020}-{secrets.token_hex(8)}", files_of(target, how, config, folder)]
        )
        self._manifest, self._parts, self._blocks = pieces_of(state, target, files, how)
        self._layers = {leaf.path: leaf.layers for leaf in state.spec.weights}
        self._changed = threading.Condition()
        self._log = Log()
        self._latest: _Version | None = None  # published, and perhaps not encoded yet
        self._sent: _Version | None = None
        self._sums: list[np.ndarray] = []
        self._worker = Worker("weights for engines", _QUEUED)
        self._place = {number: i for i, part in enumerate(self._parts) for number in part.numbers}
        self._feeds = [Feed(self, address, token, flows) for address in receivers]

    def publish(self, state: TrainState, version: int) -> None:
        """Send a state's weights; returns once the devices have the comparison in their queues.

        Args:
            state: may be donated afterwards.
            version: above the last one, such as the number of optimizer steps.

        Raises:
            RunError: an earlier version could not be encoded.
        """
        if self._latest is not None and version <= self._latest.number:
            raise ConfigurationError(f"version {version} is not above {self._latest.number}: count upwards")
        arrays = arrays_of(state)
        before = self._latest
        exponents = exponents_of(arrays, self._blocks, self._layers)
        shards = [self._compare(arrays, exponents, i, before) for i in range(len(self._parts))]
        self._latest = now = _Version(version, shards)
        while not self._worker.put(lambda: self._encode(before, now)):
            self._worker.wait(60.0, _QUEUED - 1)
        if self._worker.error is not None:
            raise RunError(f"the weights for engines: {self._worker.error}") from self._worker.error

    def _compare(
        self,
        arrays: dict[Key, jax.Array],
        exponents: dict[Key, jax.Array],
        index: int,
        before: _Version | None,
    ) -> Compared:
        part = self._parts[index]
        shard = _on(part.device, arrays[part.key])
        cut = {"layers": part.layers, "cut": part.cut}
        if part.blocks is None:
            values = rounded(shard, dtype=part.dtype, **cut)
        elif part.scales:
            values = scales_of(_on(part.device, exponents[part.key]), cut=part.cut)
        else:
            own = _on(part.device, exponents[part.key])
            values = codes_of(shard, own, np.int32(part.start), blocks=part.blocks, **cut)
        return compare(values, None if before is None else before.shards[index].values)

    def _encode(self, before: _Version | None, now: _Version) -> None:
        """Encode a version that was compared with the one before, and let the feeds send it."""
        patches: dict[int, list[Patch]] = {}
        sums = jax.device_get([shard.sums for shard in now.shards])
        if before is not None:
            patches = patches_of(self._parts, now.shards, before.shards, sums, (before.number, now.number))
        with self._changed:
            self._log.add(patches)
            self._sent, self._sums = now, sums
            self._changed.notify_all()

    @property
    def serving(self) -> dict[str, int]:
        """The version that each receiver serves, by its address; -1 before the first."""
        return {feed.address: feed.serving for feed in self._feeds}

    @property
    def errors(self) -> dict[str, BaseException]:
        """Why receivers are not connected, by address."""
        return {feed.address: feed.error for feed in self._feeds if feed.error is not None}

    def wait(self, version: int, seconds: float, receiver: str | None = None) -> bool:
        """Wait until a receiver, or each, serves a version or a newer one; False after ``seconds``."""
        limit = time.monotonic() + seconds
        while any(x < version for address, x in self.serving.items() if receiver in (None, address)):
            if time.monotonic() > limit:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """Stop sending."""
        self._worker.close()
        for feed in self._feeds:
            feed.close()

    def description(self) -> tuple[str, bytes, list[int]]:
        """As ``receiver.Source``."""
        return self.session, self._manifest, list(self._place)

    def wait_newer(self, version: int, seconds: float) -> int:
        """As ``receiver.Source``."""
        with self._changed:
            self._changed.wait_for(lambda: self._newest > version, seconds)
            return self._newest

    @property
    def _newest(self) -> int:
        return FULL if self._sent is None else self._sent.number

    def patches(self, piece: int, before: int) -> list[Patch]:
        """As ``receiver.Source``."""
        with self._changed:
            sent, every, found = self._sent, self._sums, self._log.chain(piece, before, self._newest)
        if found is not None:
            return found
        assert sent is not None
        index = self._place[piece]
        row = piece - self._parts[index].first
        return [full_patch(sent.shards[index], every[index], row, piece, sent.number)]


def _on(device: Device, array: jax.Array) -> jax.Array:
    """A device's shard of an array."""
    return next(shard.data for shard in array.addressable_shards if shard.device == device)


def patches_of(
    parts: Sequence[Part],
    now: Sequence[Compared],
    before: Sequence[Compared],
    sums: Sequence[np.ndarray],
    versions: tuple[int, int],
) -> dict[int, list[Patch]]:
    """The patches of all shards' pieces, without pieces that are smaller in full."""
    counts = jax.device_get([shard.counts for shard in now])
    packed = [
        [*start_packing(shard, old.values, own)] for shard, old, own in zip(now, before, counts, strict=True)
    ]
    found: dict[int, list[Patch]] = {}
    for part, shard, bodies, own, both in zip(parts, now, packed, counts, sums, strict=True):
        every = finished_patches(shard, bodies, own, both, part.numbers, versions)
        found |= {patch.piece: [patch] for patch in every}
    return found
