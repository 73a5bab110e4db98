"""The hops in plain numpy, on the independent codec of ``reference_codec``.

Everything is written from the documents' side: device ``(node n, local l)`` owns block ``l * nodes + n`` of a
padded leaf. Values of all devices are held at once, indexed ``[n, lane]``.
"""

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import reference_codec as codec

MASK = 0xFFFFFFFF


def mix(seed: int, *salts: int) -> int:
    """MurmurHash3's finaliser over each salt in turn."""
    for salt in salts:
        x = (seed ^ (salt * 0x9E3779B9)) & MASK
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
        seed = x ^ (x >> 16)
    return seed


@dataclass(frozen=True)
class Wire:
    """One leaf on one mesh.

    Attributes:
        nodes: extent of the slow axis.
        local: extent of the fast axis.
        size: elements of the leaf.
        weights: formats over node and local.
        grads: formats over local and node.
        padded_to: elements that each device's block is a multiple of.
        number: of the leaf, in its model.
    """

    nodes: int
    local: int
    size: int
    weights: tuple[str, str]
    grads: tuple[str, str]
    block: int
    padded_to: int
    rounding: str = "nearest"
    rotation: int = 0
    number: int = 0

    @property
    def shard(self) -> int:
        """Elements that one device owns."""
        units = -(-max(1, self.size) // (self.nodes * self.local * self.padded_to))
        return units * self.padded_to

    def pad(self, x: np.ndarray) -> np.ndarray:
        """A leaf as [local, nodes, shard], zeros at its end."""
        flat = np.zeros(self.shard * self.nodes * self.local, x.dtype)
        flat[: self.size] = x.reshape(-1)
        return flat.reshape(self.local, self.nodes, self.shard)

    def cast(self, rows: np.ndarray, fmt: str, rounding: str = "nearest", rotation: int = 0, seed: int = 0):
        """fp32 rows as they arrive, still rotated."""
        rotation = rotation if fmt in codec.TOP else 0
        payload = codec.encode(rows, fmt, self.block, rounding, rotation, seed)
        return codec.decode(payload, fmt, rows.shape[1], self.block)

    def secondary(self, w: np.ndarray) -> np.ndarray:
        """What each device of the fast axis holds after the node hop: fp32 [local, nodes, shard]."""
        blocks = self.pad(w)
        node, local = self.weights
        if self.nodes > 1:
            blocks = np.stack([self.cast(rows, node) for rows in blocks])
        if self.nodes == 1 or node != local:
            blocks = np.stack([self.cast(rows, local) for rows in blocks])
        return blocks

    def whole(self, w: np.ndarray) -> np.ndarray:
        """What every device computes with, fp32 [size]."""
        return self.secondary(w).reshape(-1)[: self.size]

    def following_copy(self, w: np.ndarray, copy: np.ndarray) -> np.ndarray:
        """Delta's copies after an update: [local, nodes, shard], in the dtype of ``copy``."""
        difference = self.pad(w) - copy.astype(np.float32)
        arrived = np.stack([self.cast(rows, self.weights[0]) for rows in difference])
        return (copy.astype(np.float32) + arrived).astype(copy.dtype)

    def salted(self, seed: int, hop: int, n: int, lane: int) -> int:
        """The seed of one device's encoder."""
        return mix(seed, self.number, hop, n, lane)

    def _sum(self, rows: list[np.ndarray], fmt: str, *, unrotate: bool) -> np.ndarray:
        total = rows[0].astype(np.float32)
        for row in rows[1:]:
            total = total + row
        if unrotate and self.rotation and fmt in codec.TOP:
            total = codec.hadamard(total) * np.float32(32**-0.5)
        return total

    def local_sums(self, grads: np.ndarray, seed: int) -> np.ndarray:
        """After the local hop: [node][local] of fp32 [nodes * shard], un-rotated."""
        out = np.zeros((self.nodes, self.local, self.nodes * self.shard), np.float32)
        fmt = self.grads[0]
        for n in range(self.nodes):
            if self.local == 1:
                out[n, 0] = self.pad(grads[n, 0]).reshape(-1)
                continue
            sent = [
                self.cast(
                    self.pad(grads[n, lane]).reshape(self.local, -1),
                    fmt,
                    self.rounding,
                    self.rotation,
                    self.salted(seed, 1, n, lane),
                )
                for lane in range(self.local)
            ]
            for lane in range(self.local):
                out[n, lane] = self._sum([rows[lane] for rows in sent], fmt, unrotate=True)
        return out

    def node_sums(
        self, sums: np.ndarray, seed: int, residuals: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """After the node hop: [node][local] of fp32 [shard]; and what encoding lost."""
        if self.nodes == 1:
            return sums.reshape(1, self.local, self.shard), None
        if residuals is not None:
            sums = sums + residuals
        owned = np.zeros((self.nodes, self.local, self.shard), np.float32)
        kept = np.zeros_like(sums)
        fmt = self.grads[1]
        for lane in range(self.local):
            sent = []
            for n in range(self.nodes):
                rows = sums[n, lane].reshape(self.nodes, self.shard)
                seeded = self.salted(seed, 2, n, lane)
                sent.append(self.cast(rows, fmt, self.rounding, self.rotation, seeded))
                back = np.stack([self._sum([row], fmt, unrotate=True) for row in sent[-1]])
                kept[n, lane] = sums[n, lane] - back.reshape(-1)
            for n in range(self.nodes):
                owned[n, lane] = self._sum([rows[n] for rows in sent], fmt, unrotate=True)
        return owned, kept if residuals is not None else None

    def two_hops(self, grads: np.ndarray, seed: int, chunks: int) -> np.ndarray:
        """Both hops at once, in ``chunks`` pieces: [node][local] of fp32 [shard]."""
        if self.nodes == 1 or self.local == 1:
            return self.node_sums(self.local_sums(grads, seed), seed)[0]
        pieces = [self._one_chunk(grads, seed, chunks, chunk) for chunk in range(chunks)]
        return np.concatenate(pieces, -1)

    def _one_chunk(self, grads: np.ndarray, seed: int, chunks: int, chunk: int) -> np.ndarray:
        first, second = self.grads
        q = self.shard // chunks
        both = first in codec.TOP and second in codec.TOP
        between = {}
        for n in range(self.nodes):
            sent = [
                self._piece(grads[n, lane], chunks, chunk, self.salted(seed, 1, n, lane))
                for lane in range(self.local)
            ]
            for lane in range(self.local):
                total = self._sum([rows[lane] for rows in sent], first, unrotate=not both)
                seeded = self.salted(mix(seed, chunk), 2, n, lane)
                rotation = 0 if both else self.rotation
                between[n, lane] = self.cast(total.reshape(-1, q), second, self.rounding, rotation, seeded)
        return np.stack(
            [
                [
                    self._sum([between[m, lane][n] for m in range(self.nodes)], second, unrotate=True)
                    for lane in range(self.local)
                ]
                for n in range(self.nodes)
            ]
        )

    def _piece(self, grad: np.ndarray, chunks: int, chunk: int, seed: int) -> np.ndarray:
        """One chunk of a gradient as the first hop's receivers decode it: [local, nodes * q].

        Random bits belong to an element's place in the padded leaf, so all of it is encoded.
        """
        q = self.shard // chunks
        rows = self.pad(grad).reshape(-1, q)
        decoded = self.cast(rows, self.grads[0], self.rounding, self.rotation, seed)
        return decoded.reshape(self.local, self.nodes, chunks, q)[:, :, chunk].reshape(self.local, -1)

    def one_hop(self, grads: np.ndarray, seed: int) -> np.ndarray:
        """A single exchange over both axes: [node][local] of fp32 [shard]."""
        world = self.nodes * self.local
        if world == 1:
            return self.pad(grads[0, 0]).astype(np.float32).reshape(1, 1, -1)
        fmt = self.grads[1]
        sent = {
            (lane, n): self.cast(
                self.pad(grads[n, lane]).reshape(world, -1),
                fmt,
                self.rounding,
                self.rotation,
                self.salted(seed, 2, n, lane),
            )
            for lane in range(self.local)
            for n in range(self.nodes)
        }
        order = sorted(sent)
        return np.stack(
            [
                [
                    self._sum([sent[peer][lane * self.nodes + n] for peer in order], fmt, unrotate=True)
                    for lane in range(self.local)
                ]
                for n in range(self.nodes)
            ]
        )

    def renumbered(self, number: int) -> "Wire":
        """The same as another leaf of the model."""
        return replace(self, number=number)


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """A numpy array of a JAX dtype's name."""
    return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
