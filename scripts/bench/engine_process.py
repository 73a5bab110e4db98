"""An engine's process in ``scripts/bench/engines.py``: tensors in GPU memory, without JAX.

Prints a line of JSON for each version: seconds on the clock ``time.monotonic`` when the first patch arrived,
when the last one had, and when the pause began and ended. A line on its input asks for the number of pieces
whose contents on the GPU have the sender's checksums.
"""

import json
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from receiver.ends import Receiver
from receiver.manifest import Manifest
from receiver.on_device import DeviceReplica
from receiver.patches import Patch, checksums

TYPES = {"BF16": torch.bfloat16, "F32": torch.float32}


class Timed(DeviceReplica):
    """Notes when patches arrive."""

    def __init__(self, device: str) -> None:
        self.device, self.times, self.decoding = device, dict[str, float](), 0.0
        super().__init__(self.made, self.paused)

    def made(self, manifest: Manifest) -> dict[str, torch.Tensor]:
        """The engine's tensors."""
        return {
            name: torch.zeros(shape, dtype=TYPES[dtype], device=self.device)
            for name, dtype, shape in manifest.tensors
        }

    @contextmanager
    def paused(self, version: int) -> Generator[None]:
        """Note how long the engine would be paused."""
        self.times["paused"] = time.monotonic()
        yield
        self.times["resumed"] = time.monotonic()

    def apply(self, session: str, patch: Patch) -> None:
        """Note the time."""
        self.times.setdefault("first", time.monotonic())
        super().apply(session, patch)

    def _decode(self, batch: list[Patch]) -> None:
        start = time.monotonic()
        super()._decode(batch)
        self.decoding += time.monotonic() - start

    def _serve(self, version: int) -> None:
        self.times["last"] = time.monotonic()
        super()._serve(version)
        memory = torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device != "cpu" else 0.0
        print(
            json.dumps({"version": version, "decoding": self.decoding, "GiB": memory} | self.times),
            flush=True,
        )
        self.times, self.decoding = {}, 0.0

    def verified(self) -> tuple[int, int]:
        """Pieces whose contents have the checksums of the sender, and all pieces."""
        assert self.manifest is not None
        pieces = self.manifest.pieces
        same = sum(
            checksums(self.read(piece).cpu().numpy().view(np.dtype(f"<u{piece.itemsize}"))) == sums
            for piece, sums in zip(pieces, self._sums, strict=True)
        )
        return same, len(pieces)


def main() -> None:
    """Arguments: HOST:PORT, device, token."""
    address, device, token = sys.argv[1:]
    replica = Timed(device)
    Receiver(replica, address, token)
    threading.current_thread().name = "engine"
    print(json.dumps({"listening": address}), flush=True)
    for _ in sys.stdin:
        same, every = replica.verified()
        print(json.dumps({"same": same, "pieces": every}), flush=True)


if __name__ == "__main__":
    main()
