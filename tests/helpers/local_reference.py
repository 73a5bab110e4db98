"""The reference of local updates: an optax loop for each node, and DiLoCo's outer update in numpy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import reference_codec
from flax import traverse_util
from plain_loop import Plain, Tree, by_path

import zerojax
from zerojax.sharding.layout import ParamLayout

Round = Callable[[np.ndarray, ParamLayout], np.ndarray]
"""From what is sent of a leaf, of unsharded shape, to what arrives."""


def exactly(x: np.ndarray, leaf: ParamLayout) -> np.ndarray:
    """What arrives of an exact format."""
    del leaf
    return x


def in_int4(block: int, rotation: int) -> Round:
    """What arrives of matrices in int4, by the independent codec; vectors travel exactly."""

    def round_(x: np.ndarray, leaf: ParamLayout) -> np.ndarray:
        if len(leaf.shape) < 2:
            return x
        stored = np.zeros((leaf.layers, leaf.padded), np.float32)
        stored[:, : leaf.size] = x.reshape(leaf.layers, -1)
        flat = stored.reshape(-1)
        sent = reference_codec.encode_row(flat, "int4", block, rotation=rotation)
        arrived = reference_codec.decode_row(sent, "int4", flat.size, block)
        if rotation:
            arrived = reference_codec.hadamard(arrived) / np.float32(np.sqrt(32))
        return arrived.reshape(stored.shape)[:, : leaf.size].reshape(x.shape)

    return round_


@dataclasses.dataclass
class DiLoCo:
    """Nodes that train by themselves, and the outer weights.

    Attributes:
        plain: the model.
        tx: the inner optimizer.
        state: of zerojax, whose options and layouts say what crosses when.
        learnt, change: what rounding makes of what is sent, in both directions.
    """

    plain: Plain
    tx: optax.GradientTransformation
    state: zerojax.TrainState
    learnt: Round = exactly
    change: Round = exactly

    def __post_init__(self) -> None:
        spec = self.state.spec
        self.zero, self.nodes = spec.zero, spec.world.nodes
        begin: dict[tuple[str, ...], np.ndarray] = {
            path: np.asarray(x, np.float32) for path, x in by_path(self.plain.weights).items()
        }
        self.own = [dict(begin) for _ in range(self.nodes)]
        self.opt = [self.tx.init(self.plain.weights) for _ in range(self.nodes)]
        self.outer, self.known = dict(begin), dict(begin)
        self.momentum = {path: np.zeros_like(x) for path, x in begin.items()}
        self.lost = [{path: np.zeros_like(x) for path, x in begin.items()} for _ in range(self.nodes)]
        self.leaves = {leaf.path: leaf for leaf in spec.leaves}
        self.fragment = {leaf.path: fragment_of(leaf, self.zero) for leaf in spec.leaves}
        self.steps = 0
        self._grad = jax.jit(jax.value_and_grad(self.plain.loss))
        self._update = jax.jit(self.tx.update)

    def step(self, batch: Any) -> tuple[float, float]:
        """Take a step; returns the nodes' mean loss, and the root mean square of their gradients' norms."""
        zero, step = self.zero, self.steps
        delay = zero.outer_delay
        changed = self._exchange(step) if delay else None
        losses, norms = [], []
        for n in range(self.nodes):
            rows = jax.tree.map(lambda x, n=n: np.split(x, self.nodes)[n], batch)
            weights = traverse_util.unflatten_dict(self.own[n])
            loss, grads = self._grad(weights, rows)
            updates, self.opt[n] = self._update(grads, self.opt[n], weights)
            after: Any = optax.apply_updates(weights, updates)
            self.own[n] = {path: np.asarray(x) for path, x in by_path(after).items()}
            losses.append(float(loss))
            norms.append(float(optax.tree.norm(grads)))
        if delay:
            self._apply(changed)
        else:
            self._apply(self._exchange(step))
        ago = max(0, delay - 1)
        if step >= ago:
            for n, path, chosen in self._each((step - ago) % zero.every):
                mixed = zero.outer_mixing * self.own[n][path] + (1 - zero.outer_mixing) * self.known[path]
                self.own[n][path] = np.where(chosen, mixed, self.own[n][path])
        self.steps += 1
        return float(np.mean(losses)), float(np.sqrt(np.mean(np.square(norms))))

    def _each(self, index: int) -> Any:
        return [(n, p, f == index) for n in range(self.nodes) for p, f in self.fragment.items()]

    def _exchange(self, step: int) -> Any:
        """The outer weights and what is known, after the exchange that begins with a step."""
        index, zero = step % self.zero.every, self.zero
        sums = {path: np.zeros_like(x) for path, x in self.outer.items()}
        for n, path, chosen in self._each(index):
            learnt = np.where(chosen, self.known[path] - self.own[n][path], 0)
            if zero.error_feedback:
                learnt = np.where(chosen, learnt + self.lost[n][path], 0)
            arrived = np.where(chosen, self.learnt(learnt, self.leaves[path]), 0)
            if zero.error_feedback:
                self.lost[n][path] = np.where(chosen, learnt - arrived, self.lost[n][path])
            sums[path] += arrived
        outer, known, momentum = dict(self.outer), dict(self.known), dict(self.momentum)
        for path, total in sums.items():
            mean, chosen = total / self.nodes, self.fragment[path] == index
            fresh = zero.outer_momentum * momentum[path] + mean
            momentum[path] = np.where(chosen, fresh, momentum[path])
            direction = mean + zero.outer_momentum * fresh
            outer[path] = np.where(chosen, outer[path] - zero.outer_learning_rate * direction, outer[path])
        sent_index = (step - 1) % zero.every if zero.outer_delay >= 2 else index
        sent = self.outer if zero.outer_delay >= 2 else outer
        for path in known:
            chosen = self.fragment[path] == sent_index
            change = np.where(chosen, sent[path] - known[path], 0)
            known[path] = known[path] + np.where(chosen, self.change(change, self.leaves[path]), 0)
        return outer, known, momentum

    def _apply(self, changed: Any) -> None:
        self.outer, self.known, self.momentum = changed

    def own_weights(self, node: int) -> Tree:
        """A node's own weights."""
        return traverse_util.unflatten_dict(self.own[node])

    @property
    def weights(self) -> Tree:
        """The outer weights."""
        return traverse_util.unflatten_dict(self.outer)


def fragment_of(leaf: ParamLayout, zero: zerojax.ZeroConfig) -> np.ndarray:
    """The fragment of each element of a leaf: runs of codec blocks in every owner's shard of its layers."""
    block = zero.block_size
    blocks = leaf.shard // block
    count = -(-leaf.layers * blocks // zero.every)
    element = np.arange(leaf.size)
    row = (element % leaf.shard) // block + blocks * np.arange(leaf.layers)[:, None]
    return (row // count).reshape(leaf.unsharded_shape)
