"""A source of weights without devices: one matrix, in two tensors of a model and in two pieces."""

import json
import threading

import numpy as np
from patch_encoder import encode

from zerojax.interop.engines.receiver.mirror import Log
from zerojax.interop.engines.receiver.patches import FULL, Patch, full

ROWS, COLUMNS, LEFT, CUT = 8, 12, 6, 50

MANIFEST = {
    "files": {"config.json": "e30K"},
    "tensors": [["a", "BF16", [LEFT, ROWS]], ["b", "BF16", [ROWS, COLUMNS - LEFT]]],
    # "a" has the first columns transposed, "b" has the others.
    "matrices": [[COLUMNS, [[0, 0, ROWS, 0, LEFT, 0, 1, ROWS], [1, 0, ROWS, LEFT, COLUMNS, 0, LEFT, 1]]]],
    "pieces": [[0, 64, [[0, 0, CUT]]], [0, 64, [[0, CUT, ROWS * COLUMNS]]]],
}


class NumpySource:
    """A ``receiver.Source`` of a matrix of 16-bit elements."""

    def __init__(self, session: str = "1", seed: int = 0, log: int = 1 << 20) -> None:
        self.session, self.version = session, FULL
        self.rng = np.random.default_rng(seed)
        self.matrix = self.rng.integers(0, 1 << 16, (ROWS, COLUMNS), np.uint16)
        self._log, self._changed = Log(log), threading.Condition()

    def pieces(self) -> list[np.ndarray]:
        """The elements of each piece."""
        flat, padding = self.matrix.reshape(-1), np.zeros(64, np.uint16)
        return [np.append(x, padding)[:64] for x in (flat[:CUT], flat[CUT:])]

    def step(self) -> list[Patch]:
        """Change some elements, and publish the next version; returns its patches."""
        with self._changed:
            before = self.pieces()
            self.matrix = self.matrix + (self.rng.random(self.matrix.shape) < 0.1).astype(np.uint16)
            first, self.version = self.version == FULL, self.version + 1
            every = [
                full(new, i, self.version)
                if first
                else encode(before[i], new, i, self.version - 1, self.version)
                for i, new in enumerate(self.pieces())
            ]
            self._log.add({patch.piece: [patch] for patch in every})
            self._changed.notify_all()
        return every

    def expected(self) -> dict[str, np.ndarray]:
        """The tensors."""
        return {"a": self.matrix[:, :LEFT].T, "b": self.matrix[:, LEFT:]}

    def description(self) -> tuple[str, bytes, list[int]]:
        """As ``receiver.Source``."""
        return self.session, json.dumps(MANIFEST).encode(), [0, 1]

    def wait_newer(self, version: int, seconds: float) -> int:
        """As ``receiver.Source``."""
        with self._changed:
            self._changed.wait_for(lambda: self.version > version, seconds)
            return self.version

    def patches(self, piece: int, before: int) -> list[Patch]:
        """As ``receiver.Source``."""
        with self._changed:
            found = self._log.chain(piece, before, self.version)
            return [full(self.pieces()[piece], piece, self.version)] if found is None else found
