"""Continues texts with an unsharded model on one device: all tokens at once, or one by one."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from numbers import Integral
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import PathParts
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int, Key
from numpy.typing import ArrayLike

from zerojax.adapters.stack import Stack
from zerojax.comm.xla_options import compiler_options
from zerojax.errors import ConfigurationError
from zerojax.generation.checks import checked_limits, checked_prompts, checked_stop
from zerojax.generation.engine import Drawn, Engine, Queue, padded_length, row_keys
from zerojax.generation.protocol import Cache, Decoder, decoded
from zerojax.generation.sampling import Sampling, sample
from zerojax.matmul.operand import LayerOperand
from zerojax.sharding.mesh import make_mesh

_Graph = nnx.GraphDef[Decoder]


def continue_text(
    model: nnx.Module,
    prompts: Int[Array | np.ndarray, "batch prompt"] | Sequence[Int[np.ndarray, " prompt"]],
    new_tokens: int,
    *,
    key: Key[Array, ""],
    how: Sampling | None = None,
    stop: int | None = None,
) -> Int[np.ndarray, "batch new"]:
    """Continue each prompt.

    Lengths are rounded up to powers of two, so that a few compiled programs serve all prompts. When the
    context is full, a text continues from its last context_length / 2 tokens.

    Args:
        model: an unsharded model, such as ``zerojax.gather_model(state)``.
        prompts: int32 ids, as an array or as rows of different lengths, each of which is continued as it
            would be alone; of a prompt longer than the context only the last half of a context is used.
        new_tokens: number of tokens to add.
        key: random key; the same key gives the same text.
        how: temperature, top-k and top-p; None is ``Sampling()``.
        stop: a token that ends its row, such as the end of a text; it fills the rest of the row.

    Returns:
        int32 new tokens, without the prompts.

    Raises:
        ConfigurationError: a prompt is empty, is not a vector, or has ids that the model does not have; there
            is none; new_tokens is below 1; stop is several tokens; or the model cannot generate.
    """
    texts, context = _checked(model, prompts, new_tokens, stop)
    graph, weights = _split(model)
    run = _compiled(_continue, _mesh(weights))
    answers: list[list[int]] = [[] for _ in texts]
    unfinished = list(range(len(texts)))
    while unfinished:
        windows = [_window(texts[i], answers[i], context) for i in unfinished]
        room = [new_tokens - len(answers[i]) for i in unfinished]
        limits = [_limit(window, left, context) for window, left in zip(windows, room, strict=True)]
        engine = _engine(model, len(texts), max(map(len, windows)), max(limits), context, how, stop)
        first = [len(answers[i]) for i in unfinished]
        queue = engine.queue(windows, unfinished, first, limits, len(texts))
        drawn = jax.tree.map(np.asarray, run(graph, weights, queue, key, engine=engine))
        for number, i in enumerate(unfinished):
            answers[i] += drawn.tokens[number, : drawn.lengths[number]].tolist()
        unfinished = [
            i for i in unfinished if len(answers[i]) < new_tokens and (stop is None or answers[i][-1] != stop)
        ]
    fill = 0 if stop is None else stop
    return np.asarray([answer + [fill] * (new_tokens - len(answer)) for answer in answers], np.int32)


def stream(
    model: nnx.Module,
    prompt: Int[np.ndarray, " prompt"],
    new_tokens: int,
    *,
    key: Key[Array, ""],
    how: Sampling | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """The tokens of ``continue_text`` for one prompt, one by one as they are drawn, up to ``stop``.

    Arguments and errors are those of ``continue_text``. ``stop`` itself is not among the tokens.
    """
    [text], context = _checked(model, [prompt], new_tokens, stop)
    graph, weights = _split(model)
    mesh = _mesh(weights)
    first = _compiled(_first, mesh)
    following = _compiled(_next, mesh)
    answer: list[int] = []
    while len(answer) < new_tokens:
        window = _window(text, answer, context)
        limit = _limit(window, new_tokens - len(answer), context)
        engine = _engine(model, 1, len(window), limit, context, how, stop)
        queue = engine.queue([window], [0], [len(answer)], [limit], 1)
        token, cache = first(graph, weights, queue, key, engine=engine)
        for made in range(1, limit + 1):
            drawn = int(token[0])
            if drawn == stop:
                return
            yield drawn
            answer.append(drawn)
            if made < limit:
                token, cache = following(graph, weights, queue, token, made, cache, key, engine=engine)


def _split(model: nnx.Module) -> tuple[_Graph, nnx.State]:
    """``nnx.split``, with the parameters of stacks as ``LayerOperand``: products of a merged model read each
    layer's weights where they lie."""
    graph, state = nnx.split(model)
    stacks = [(*path, "block") for path, each in nnx.iter_modules(model) if isinstance(each, Stack)]

    def marked(path: PathParts, variable: object) -> object:
        if isinstance(variable, nnx.Param) and any(path[: len(stack)] == stack for stack in stacks):
            return variable.replace(LayerOperand(variable.get_raw_value()))
        return variable

    flat = [(path, marked(path, variable)) for path, variable in nnx.to_flat_state(state)]
    return cast(_Graph, graph), nnx.from_flat_state(flat)


def _checked(
    model: nnx.Module, prompts: Iterable[ArrayLike], new_tokens: int, stop: object
) -> tuple[list[np.ndarray], float]:
    """The prompts, and the model's context."""
    context, vocabulary = checked_limits(model)
    if new_tokens < 1:
        raise ConfigurationError(f"new_tokens = {new_tokens}: at least 1")
    if not isinstance(stop, Integral | None):
        raise ConfigurationError(f"stop = {stop!r}: one token, or None")
    return checked_prompts(prompts, vocabulary), context


def _window(text: np.ndarray, answer: list[int], context: float) -> np.ndarray:
    """What the model sees of a text: all, or half a context if it is longer than one."""
    text = np.concatenate([text, np.asarray(answer, np.int32)])
    return text if len(text) <= context else text[-max(1, int(context) // 2) :]


def _limit(window: np.ndarray, wanted: int, context: float) -> int:
    """How many tokens can be added: the last new one is never an input, and needs no room in the context."""
    return int(min(wanted, context - len(window) + 1))


def _engine(
    model: nnx.Module,
    rows: int,
    prompt: int,
    limit: int,
    context: float,
    how: Sampling | None,
    stop: int | None,
) -> Engine:
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    dtype = next(x.dtype.name for x in weights if jnp.issubdtype(x.dtype, jnp.floating))
    new_tokens = padded_length(limit, context)
    return Engine.of(
        rows, prompt, new_tokens, context, dtype=dtype, how=how or Sampling(), stop=checked_stop(stop)
    )


def _mesh(weights: nnx.State) -> Mesh:
    """A mesh of one device that has the weights."""
    placed = next((x for x in jax.tree.leaves(weights) if isinstance(x, jax.Array)), jnp.zeros(()))
    return make_mesh(1, 1, devices=[min(placed.devices(), key=lambda device: device.id)])


@cache
def _compiled(run: Callable[..., object], mesh: Mesh) -> jax.stages.Wrapped:
    """A function of this module as one program, compiled like ``zerojax.generate``."""
    options = compiler_options(mesh, separate_products=True)
    donated = "cache" if run is _next else ()  # else every token would copy it
    static = ("graph", "engine")
    return jax.jit(run, static_argnames=static, donate_argnames=donated, compiler_options=options)


def _continue(
    graph: _Graph, weights: nnx.State, queue: Queue, key: Key[Array, ""], *, engine: Engine
) -> Drawn:
    return engine.run(lambda *_: nnx.merge(graph, weights), queue, key)


def _first(
    graph: _Graph, weights: nnx.State, queue: Queue, key: Key[Array, ""], *, engine: Engine
) -> tuple[Int[Array, " 1"], Cache]:
    """The first new token of a queue of one row, and the cache of the prompt."""
    last, cache = engine.prefilled(
        lambda *_: nnx.merge(graph, weights), queue.prompts, queue.lengths, engine.length
    )
    return _drawn(nnx.merge(graph, weights), last, queue, 0, key, engine), cache


def _next(
    graph: _Graph,
    weights: nnx.State,
    queue: Queue,
    token: Int[Array, " 1"],
    made: Int[Array, ""],
    cache: Cache,
    key: Key[Array, ""],
    *,
    engine: Engine,
) -> tuple[Int[Array, " 1"], Cache]:
    """The token after ``token``, the last of ``made`` tokens; and the cache with ``token`` in it."""
    model = nnx.merge(graph, weights)
    end = queue.lengths + made
    hidden, cache = decoded(model, token[:, None], end - 1, end, cache)
    return _drawn(model, hidden[:, 0], queue, made, key, engine), cache


def _drawn(
    model: Decoder,
    hidden: Float[Array, "1 width"],
    queue: Queue,
    made: int | Int[Array, ""],
    key: Key[Array, ""],
    engine: Engine,
) -> Int[Array, " 1"]:
    return sample(model.logits(hidden), row_keys(key, queue.rows, queue.first + made), engine.how)[0]
