"""``zerojax.generate``: continue prompts on the mesh, with the sharded weights of a train state."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, UInt32
from numpy.typing import ArrayLike

from zerojax.adapters.adapter import ModelState
from zerojax.comm.in_order import on_mesh
from zerojax.comm.xla_options import compiler_options
from zerojax.errors import ConfigurationError
from zerojax.generation.checks import (
    Limits,
    Stop,
    abstract_model,
    check_limits,
    checked_limits,
    checked_prompts,
    checked_stop,
)
from zerojax.generation.copy import Form, GenerationCopy, GenerationMemory, fitting_form
from zerojax.generation.engine import Drawn, Engine, Queue
from zerojax.generation.protocol import Decoder
from zerojax.generation.sampling import Sampling
from zerojax.log import logger
from zerojax.schedule.user_code import translated_errors
from zerojax.sharding.mesh import BY_ROWS, LOCAL
from zerojax.train.batch import local_rows, place
from zerojax.train.fields import specs_of
from zerojax.train.memory import free_memory
from zerojax.train.pass_weights import ByPath
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState, check_there
from zerojax.train.step import check_adapters
from zerojax.validation.bounds import checked_seed


class Completions(NamedTuple):
    """The result of ``generate``: NumPy arrays, in the order of the prompts.

    Attributes:
        tokens: new tokens, int32; 0 after the end of a row.
        lengths: new tokens of each row, including the tokens that end it, int32.
        log_probs: log-probability of each token under softmax(logits / temperature), before ``top_k`` and
            ``top_p``, fp32. At temperature 0 it is under softmax(logits). 0 after the end of a row.
    """

    tokens: Int[np.ndarray, "rows max_new_tokens"]
    lengths: Int[np.ndarray, " rows"]
    log_probs: Float[np.ndarray, "rows max_new_tokens"]


def generate(
    state: TrainState,
    prompts: Sequence[Int[np.ndarray, " prompt"]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Stop = None,
    seed: int = 0,
    weights: Literal["auto", "compute", "fp8", "int8", "gathered"] = "auto",
    slots: int | None = None,
    adapters: bool = True,
) -> Completions:
    """Continue prompts with the weights of a state, which stay sharded; the prompts are spread over the mesh.

    First every node makes a copy of the weights in the form ``weights``. Then each device continues its own
    prompts with a key-value cache, and no weight crosses nodes.

    The model needs the methods ``init_cache``, ``decode`` and ``logits`` (docs/generation.md); zerojax's
    models have them. Prompt lengths are rounded up to powers of two, so that a few compiled programs serve
    all lengths.

    Args:
        state: a filled state; it is not donated.
        prompts: vectors of int32 ids, of any lengths from 1. With several processes, this process's part of
            the prompts; all parts have the same number.
        max_new_tokens: the most new tokens of a row.
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: draw only from this many likeliest tokens.
        top_p: draw only from the fewest likeliest tokens whose probabilities sum to this.
        stop: ends of a row: a token, or a list of ends, each a token or a tuple of tokens in their order.
        seed: seed of the random bits. They depend only on the seed, the row's index over all processes, and
            the position in the response. The result is therefore the same on every mesh and with any
            ``slots``, up to rounding.
        weights: the form of the copy. Copies in "compute", "fp8" and "int8" are whole on every device.
            "gathered" is spread over a node's devices and gathered layer by layer. "auto" is "compute" if
            that fits into a device's memory in addition to the state, and "gathered" otherwise.
        slots: rows that a device decodes together; by default its number of rows, at most 64. When a row
            ends, the next prompt takes its place.
        adapters: whether to apply low-rank adapters; without them the base model generates.

    Raises:
        ConfigurationError: one of these:

            - A prompt is empty, is not a vector, has ids that the model does not have, or exceeds the context
              together with max_new_tokens.
            - Another argument is invalid, or ``adapters`` is False and there are none.
            - The model lacks a method, or the state is abstract or was donated.
            - Processes pass different numbers of prompts.
    """
    return generate_rows(
        state,
        prompts,
        [max_new_tokens] * len(prompts),
        how=Sampling(temperature, top_k, top_p),
        stop=stop,
        seed=seed,
        weights=weights,
        slots=slots,
        adapters=adapters,
        unread=0,
    )


def generate_rows(
    state: TrainState,
    prompts: Sequence[ArrayLike],
    limits: Sequence[int],
    *,
    how: Sampling,
    stop: Stop = None,
    seed: int = 0,
    weights: Literal["auto"] | Form = "auto",
    slots: int | None = None,
    adapters: bool = True,
    unread: int = 1,
    width: int | None = None,
) -> Completions:
    """``generate`` with a separate limit of new tokens for each row.

    Args:
        unread: tokens at the end of a row that need no room in the context. 1 is enough for all rows, because
            the model never reads a row's last token.
        width: the most new tokens of any row in any call. With it, calls with other limits share a compiled
            program, and a row of limit 0 gets no tokens.
    """
    spec = state.spec
    if weights not in ("auto", *get_args(Form)):
        raise ConfigurationError(f"weights={weights!r} is not one of auto, {', '.join(get_args(Form))}.")
    if slots is not None and slots < 1:
        raise ConfigurationError(f"slots={slots} must be at least 1.")
    check_there(state)
    check_adapters(spec, adapters=adapters)
    ends = checked_stop(stop)
    random_bits = checked_seed(seed)
    most = spec.once("limits", lambda: checked_limits(abstract_model(spec)))
    batch = _agree(spec, prompts, limits, most, unread, width)
    dtype = str(spec.zero.compute_dtype)
    engine = Engine.of(
        batch.rows, batch.longest, batch.new, most.context, dtype=dtype, how=how, stop=ends, slots=slots
    )
    copy = _copy(spec, engine, weights, batch.room, adapters=adapters)
    if copy.form == "gathered" and spec.world.local > 1:
        engine = dataclasses.replace(engine, group=LOCAL)
    order = _order(limits, batch.rows, len(spec.mesh.local_devices))
    waiting = order >= 0
    nothing = np.zeros(0, np.int32)
    queue = engine.queue(
        [batch.prompts[row] if row >= 0 else nothing for row in order],
        np.where(waiting, batch.first + order, 0).tolist(),
        np.where(waiting, np.asarray(limits)[order], 0).tolist(),
        len(order),
    )
    queue = place(spec, queue, 1, shared=False)
    drawn = _program(copy, engine, queue)(copy.make(state), state.model_state, queue, random_bits)
    found = [np.zeros((len(prompts), *x.shape[1:]), x.dtype) for x in drawn]
    for rows, x in zip(found, drawn, strict=True):
        rows[order[waiting]] = local_rows(x)[waiting]
    return Completions(*found)


def _order(limits: Sequence[int], rows: int, devices: int) -> Int[np.ndarray, " queue"]:
    """The row at each place of the queues of this process's devices; -1 for none.

    Rows of limit 0 get no place. The others are spread evenly, and come first in each queue.
    """
    waiting = np.flatnonzero(limits)
    order = np.full((devices, rows), -1)
    each = max(1, -(-len(waiting) // devices))
    number = np.arange(len(waiting))
    order[number // each, number % each] = waiting
    return order.reshape(-1)


class _Batch(NamedTuple):
    """The sizes on which all processes agree, and this process's prompts.

    Attributes:
        prompts: this process's prompts.
        longest: tokens of the longest prompt with a limit above 0.
        new: columns of the results: the largest limit, or the ``width`` of ``_agree``.
        room: MiB of a device's memory that the state leaves free.
        first: the index of this process's first row among all processes' rows.
        rows: rows of a device, padded.
    """

    prompts: list[Int[np.ndarray, " prompt"]]
    longest: int
    new: int
    room: int
    first: int
    rows: int


def _agree(
    spec: TrainSpec,
    prompts: Sequence[ArrayLike],
    limits: Sequence[int],
    most: Limits,
    unread: int,
    width: int | None,
) -> _Batch:
    """The batch of all processes."""
    processes = sorted({device.process_index for device in spec.mesh.devices.flat})
    refused: ConfigurationError | None = None
    rows: list[np.ndarray] = []
    try:
        rows = checked_prompts(prompts, most.vocabulary)
        check_limits(rows, limits, most.context + unread, least=1 if width is None else 0)
        longest = max((len(row) for row, limit in zip(rows, limits, strict=True) if limit), default=1)
        mine = [len(rows), longest, width or max(limits), free_memory(spec)]
    except ConfigurationError as error:
        # Raise only after the exchange: the other processes wait for it.
        refused = error
        mine = [-1] * 4
    found = np.asarray([mine])
    if len(processes) > 1:
        found = np.asarray(multihost_utils.process_allgather(np.asarray(mine, np.int32)))
    if refused is not None:
        raise refused
    if found.min() < 0:
        raise ConfigurationError("the prompts of another process were refused: see its message.")
    counts = found[:, 0].tolist()
    if len(set(counts)) > 1:
        raise ConfigurationError(f"the processes pass {counts} prompts: pass the same number in each.")
    return _Batch(
        prompts=rows,
        longest=int(found[:, 1].max()),
        new=int(found[:, 2].max()),
        room=int(found[:, 3].min()),
        first=processes.index(jax.process_index()) * len(rows),
        rows=-(-len(rows) // len(spec.mesh.local_devices)),
    )


def _copy(
    spec: TrainSpec, engine: Engine, weights: Literal["auto"] | Form, room: int, *, adapters: bool
) -> GenerationCopy:
    """The copy in the requested form; "auto" selects the form that fits into ``room`` MiB of a device."""
    form = fitting_form(spec, engine, room, adapters=adapters) if weights == "auto" else weights
    return spec.once(
        f"generation copy of {form} {adapters}", lambda: GenerationCopy.of(spec, form, adapters=adapters)
    )


def _program(copy: GenerationCopy, engine: Engine, queue: Queue) -> jax.stages.Wrapped:
    """The compiled function that draws tokens, from a copy, model state, a queue and a seed."""

    def make() -> jax.stages.Wrapped:
        logger.info("generating with %s", GenerationMemory.of(copy, engine))
        return generation_program(copy, engine)

    name = f"generate {copy.form} {copy.adapters} {queue.prompts.shape} {engine}"
    return copy.spec.once(name, make)


def generation_program(copy: GenerationCopy, engine: Engine) -> jax.stages.Wrapped:
    """``_program`` without the cache.

    Devices do not wait for each other, except for a node's devices if the copy is "gathered".
    """
    spec = copy.spec

    def local(weights: ByPath, model_state: ModelState, queue: Queue, seed: UInt32[Array, ""]) -> Drawn:
        placed = copy.place(weights)

        def bind(after: Array | None = None) -> Decoder:
            own = placed
            if engine.group is not None and after is not None:
                # These gathers must follow a refill's gathers: devices with other orders would deadlock.
                own, _ = lax.optimization_barrier((placed, after))
            return spec.adapter.bind(own, model_state, train=False, key=None).model

        with translated_errors():
            return engine.run(bind, queue, jax.random.key(seed))

    run = on_mesh(
        local,
        spec.mesh,
        in_specs=(specs_of(copy.abstract), PartitionSpec(), BY_ROWS, PartitionSpec()),
        out_specs=BY_ROWS,
    )
    return jax.jit(run, compiler_options=compiler_options(spec.mesh, separate_products=True))
