"""Continuous batching on one device: slots decode together and are refilled from a queue of prompts.

A slot holds one row of the key-value cache. Each turn of the loop first refills free slots, a few at a time.
Prefill computes the cache and the first token of prompts, in pieces if they are long. Then one decode step
draws the next token of every slot. A slot becomes free when its row draws a stop token or reaches its limit
(Yu et al., "Orca", OSDI 2022, iteration-level scheduling).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from zerojax.generation.protocol import Cache, Decoder, batch_axes, decoded
from zerojax.generation.sampling import Sampling, sample

_SLOTS = 64
"""Default for the rows that a device decodes together."""
_PREFILL_TOKENS = 8192
"""Tokens of prompts that pass through the model together."""


class Queue(NamedTuple):
    """Prompts that wait for a slot. Prompts of length 0 only fill up the array, and come last.

    Attributes:
        prompts: padded on the right.
        lengths: tokens of each prompt.
        rows: each prompt's row over all processes, which salts its random bits.
        limits: the most new tokens of each prompt, at least 1.
    """

    prompts: Int[Array, "queue prompt"]
    lengths: Int[Array, " queue"]
    rows: Int[Array, " queue"]
    limits: Int[Array, " queue"]


class Drawn(NamedTuple):
    """New tokens and their log-probabilities in the queue's order; zeros after the length of each row."""

    tokens: Int[Array, "queue new"]
    lengths: Int[Array, " queue"]
    log_probs: Float[Array, "queue new"]


class Bind(Protocol):
    """Makes the model for each part of the program: an ``nnx.Module`` belongs to the trace that made it."""

    def __call__(self, after: Array | None = None, /) -> Decoder:
        """Return the model with its gathers delayed until ``after`` has been computed."""
        ...


@dataclass(frozen=True)
class Engine:
    """Static options of a generation program.

    Attributes:
        slots: rows that are decoded together.
        prefill: prompts that are prefilled together.
        prompt: columns of the array of prompts.
        new_tokens: the most new tokens of a row.
        length: tokens of a slot's cache.
        dtype: dtype of the cache.
        how: how to draw tokens.
        stop: ends of a row, each as tokens in their order.
        group: a mesh axis whose devices gather weights from each other, and so must run the same layers at
            the same time; None if there is none.
        piece: the most tokens of a prompt that are prefilled together; longer prompts are split into pieces.
    """

    slots: int
    prefill: int
    prompt: int
    new_tokens: int
    length: int
    dtype: str
    how: Sampling
    stop: tuple[tuple[int, ...], ...]
    group: str | None = None
    piece: int = _PREFILL_TOKENS

    @staticmethod
    def of(
        rows: int,
        prompt: int,
        new_tokens: int,
        context: float,
        *,
        dtype: str,
        how: Sampling,
        stop: tuple[tuple[int, ...], ...] = (),
        slots: int | None = None,
    ) -> "Engine":
        """The engine for ``rows`` rows per device, each of at most ``prompt`` and ``new_tokens`` tokens.

        Args:
            context: the model's longest sequence, which may be infinite.
            slots: rows that are decoded together; None for the default, at most ``rows``.
        """
        slots = min(slots or _SLOTS, rows)
        padded = padded_length(prompt, context)
        # Free slots wait until this many can be filled together, at most a quarter of all.
        prefill = max(1, min(_PREFILL_TOKENS // padded, -(-slots // 4)))
        length = int(min(padded + new_tokens, max(context, padded)))
        return Engine(slots, prefill, padded, new_tokens, length, dtype, how, stop, piece=_PREFILL_TOKENS)

    def queue(
        self,
        prompts: Sequence[Int[np.ndarray, " prompt"]],
        rows: Sequence[int],
        limits: Sequence[int],
        size: int,
    ) -> Queue:
        """A queue of ``size`` rows on the host, int32, padded with rows of limit 0; see ``Queue``."""
        tokens = np.zeros((size, self.prompt), np.int32)
        for own, prompt in zip(tokens, prompts, strict=False):
            own[: len(prompt)] = prompt
        columns = np.zeros((3, size), np.int32)
        columns[:, : len(prompts)] = [len(prompt) for prompt in prompts], rows, limits
        return Queue._make((tokens, *columns))

    def run(self, bind: Bind, queue: Queue, key: Key[Array, ""]) -> Drawn:
        """Continue every prompt of a queue.

        Random bits depend on the key, ``Queue.rows`` and the position in the response.
        """
        count = queue.lengths.shape[0]
        out = Drawn(
            jnp.zeros((count, self.new_tokens), jnp.int32),
            jnp.zeros(count, jnp.int32),
            jnp.zeros((count, self.new_tokens), jnp.float32),
        )
        free = jnp.full(self.slots, count, jnp.int32)
        none = jnp.zeros(self.slots, jnp.int32)
        cache = self.empty_cache(bind, self.slots, self.length)
        axes = batch_axes(lambda rows: self.empty_cache(bind, rows, self.length))
        slots = _Slots(free, none, none, cache)
        loop = _Loop(jnp.int32(0), slots, out, jnp.bool(True), jnp.bool(True))

        def refill(loop: _Loop) -> _Loop:
            return self._decide(self._prefill(bind, axes, queue, key, loop), queue)

        def turn(loop: _Loop) -> _Loop:
            loop = lax.while_loop(lambda loop: loop.refill, refill, loop)
            return self._decide(self._decode(bind(loop.refill), queue, key, loop), queue)

        return lax.while_loop(lambda loop: loop.busy, turn, loop).out

    def empty_cache(self, bind: Callable[[], Decoder], rows: int, length: int) -> Cache:
        """An empty cache for ``rows`` rows of ``length`` tokens."""
        return bind().init_cache(rows, length, jnp.dtype(self.dtype))

    def _decide(self, loop: "_Loop", queue: Queue) -> "_Loop":
        """Set whether to refill slots, and whether any row is left.

        Slots are refilled when enough are free for a whole prefill, or for the rest of the queue.
        """
        count = queue.lengths.shape[0]
        free = jnp.sum(loop.slots.row == count)
        left = jnp.sum(queue.lengths > 0) - loop.started
        most = jnp.minimum(free, left)
        refill = (most > 0) & ((most >= self.prefill) | (most == left))
        flags = jnp.stack([refill, (left > 0) | (free < self.slots)])
        if self.group is not None:
            # Devices that gather from each other must take the same branch.
            flags = lax.pmax(flags.astype(jnp.int32), self.group) > 0
        return loop._replace(refill=flags[0], busy=flags[1])

    def _prefill(
        self, bind: Bind, axes: PyTree[int], queue: Queue, key: Key[Array, ""], loop: "_Loop"
    ) -> "_Loop":
        """Put the next prompts of the queue into free slots, and draw their first tokens."""
        slots = loop.slots
        count = queue.lengths.shape[0]
        numbers = jnp.arange(self.prefill)
        is_free = slots.row == count
        left = jnp.sum(queue.lengths > 0) - loop.started
        valid = numbers < jnp.minimum(jnp.sum(is_free), left)
        index = jnp.where(valid, loop.started + numbers, 0)
        prompts = queue.prompts[index]
        lengths = jnp.maximum(queue.lengths[index], 1)
        same = prompts.shape[1] > self.piece or getattr(bind(), "keys_by_cache_length", False)
        last, cache = self.prefilled(bind, prompts, lengths, self.length if same else prompts.shape[1])
        # Free slots are first in this order. Rows that are not valid go to a slot that does not exist.
        order = jnp.argsort(~is_free, stable=True)[: self.prefill]
        place = jnp.where(valid, order, self.slots)
        row = jnp.where(valid, index, count)
        token, out, ended = self._draw(bind(), last, queue, key, row, jnp.zeros_like(row), loop.out)
        slots = _Slots(
            slots.row.at[place].set(jnp.where(ended, count, row), mode="drop"),
            slots.token.at[place].set(token, mode="drop"),
            slots.made.at[place].set(1, mode="drop"),
            # A single slot is free here, so the new cache replaces its memory. In a group it may be busy.
            cache
            if same and self.slots == 1 and self.group is None
            else _insert(slots.cache, cache, place, axes),
        )
        return loop._replace(started=loop.started + jnp.sum(valid), slots=slots, out=out)

    def prefilled(
        self, bind: Bind, prompts: Int[Array, "rows prompt"], lengths: Int[Array, " rows"], length: int
    ) -> tuple[Float[Array, "rows width"], Cache]:
        """The input of ``logits`` for each prompt's last token, and a cache of ``length`` tokens with all
        prompts.

        A prompt longer than a piece passes through the model piece by piece. Each piece attends to the
        earlier ones in the cache, so only one piece's activations exist (Agrawal et al., 2023, "SARATHI",
        chunked prefills). Pieces without any prompt's tokens are skipped.
        """
        rows, width = prompts.shape
        first, cache = jnp.zeros_like(lengths), self.empty_cache(bind, rows, length)
        if width <= self.piece or not getattr(bind(), "prefills_in_pieces", True):
            hidden, cache = decoded(bind(), prompts, first, lengths, cache)
            return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0], cache
        prompts = jnp.pad(prompts, ((0, 0), (0, -width % self.piece)))
        pieces = -(-jnp.max(lengths) // self.piece)
        if self.group is not None:
            pieces = lax.pmax(pieces, self.group)  # devices gather a layer's weights together

        def run(start: Array, cache: Cache) -> tuple[Array, Cache]:
            """The last token of each prompt so far, and the cache with the piece at ``start``."""
            tokens = lax.dynamic_slice_in_dim(prompts, start, self.piece, axis=1)
            before, after = jnp.minimum(start, lengths), jnp.minimum(start + self.piece, lengths)
            hidden, cache = decoded(bind(), tokens, before, after, cache)
            last = jnp.maximum(after - before - 1, 0)
            return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0], cache

        def add(number: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
            last, cache = carry
            start = number * self.piece
            now, cache = run(start, cache)
            return jnp.where((lengths > start)[:, None], now, last), cache

        shape, _ = jax.eval_shape(run, first[0], cache)
        return lax.fori_loop(0, pieces, add, (jnp.zeros(shape.shape, shape.dtype), cache))

    def _decode(self, model: Decoder, queue: Queue, key: Key[Array, ""], loop: "_Loop") -> "_Loop":
        """Draw the next token of every slot; the tokens of free slots are dropped."""
        slots = loop.slots
        count = queue.lengths.shape[0]
        lengths = queue.lengths.at[slots.row].get(mode="fill", fill_value=1)
        end = jnp.where(slots.row < count, lengths + slots.made, 1)
        hidden, cache = decoded(model, slots.token[:, None], end - 1, end, slots.cache)
        token, out, ended = self._draw(model, hidden[:, 0], queue, key, slots.row, slots.made, loop.out)
        row = jnp.where(ended, count, slots.row)
        return loop._replace(slots=_Slots(row, token, slots.made + 1, cache), out=out)

    def _draw(
        self,
        model: Decoder,
        hidden: Float[Array, "slots width"],
        queue: Queue,
        key: Key[Array, ""],
        row: Int[Array, " slots"],
        made: Int[Array, " slots"],
        out: Drawn,
    ) -> tuple[Int[Array, " slots"], Drawn, Bool[Array, " slots"]]:
        """Draw the next token of each row of the queue, and return which rows end with it.

        ``made`` is the number of tokens that each row has so far.
        """
        # A free slot's row is beyond the queue: it reads the fill value, and its writes are dropped.
        number = queue.rows.at[row].get(mode="fill", fill_value=0)
        limit = queue.limits.at[row].get(mode="fill", fill_value=1)
        token, log_prob = sample(model.logits(hidden), row_keys(key, number, made), self.how)
        ended = made + 1 >= limit
        out = Drawn(
            out.tokens.at[row, made].set(token, mode="drop"),
            out.lengths.at[row].set(made + 1, mode="drop"),
            out.log_probs.at[row, made].set(log_prob, mode="drop"),
        )
        for tokens in self.stop:
            # The last places of a response; places before its beginning are negative.
            places = made[:, None] + jnp.arange(1 - len(tokens), 1)
            last = out.tokens.at[row[:, None], places].get(mode="fill", fill_value=-1)
            ended |= jnp.all((last == jnp.asarray(tokens)) & (places >= 0), axis=1)
        return token, out, ended


class _Slots(NamedTuple):
    """The state of all slots.

    Attributes:
        row: the queue's row in each slot; the length of the queue if the slot is free.
        token: the last drawn token, which is not in the cache yet.
        made: tokens drawn so far.
        cache: the cache of all slots.
    """

    row: Int[Array, " slots"]
    token: Int[Array, " slots"]
    made: Int[Array, " slots"]
    cache: Cache


class _Loop(NamedTuple):
    """The loop's carry.

    Attributes:
        started: rows of the queue that have had a slot.
        slots: this device's slots.
        out: tokens so far.
        refill: whether to refill slots now.
        busy: whether a row is in a slot or in the queue.
    """

    started: Int[Array, ""]
    slots: _Slots
    out: Drawn
    refill: Bool[Array, ""]
    busy: Bool[Array, ""]


def padded_length(prompt: int, context: float) -> int:
    """The array length for a prompt: the next power of two, at least 16, at most the context."""
    return int(min(max(16, 1 << (prompt - 1).bit_length()), max(context, prompt)))


def row_keys(
    key: Key[Array, ""], rows: Int[Array, " batch"], positions: Int[Array, " batch"]
) -> Key[Array, " batch"]:
    """The random key of each row's token at a position of its response."""
    return jax.vmap(lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position))(
        rows, positions
    )


def _insert(cache: Cache, filled: Cache, place: Int[Array, " rows"], axes: PyTree[int]) -> Cache:
    """The cache with prefilled rows at their places."""

    def insert(whole: Array, part: Array, axis: int) -> Array:
        where: list[slice | Array] = [slice(0, size) for size in part.shape]
        where[axis] = place
        return whole.at[tuple(where)].set(part, mode="drop")

    return jax.tree.map(insert, cache, filled, axes)
