"""Continuing a text with an unsharded model on one device, token by token."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.typing import PathParts
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Float, Int, Key

from zerojax.adapters.nnx_units import Stack
from zerojax.comm.xla_options import compiler_options
from zerojax.errors import ConfigurationError
from zerojax.generation.checks import checked_limits, checked_prompts
from zerojax.generation.engine import Engine, Queue, padded_length, row_keys
from zerojax.generation.protocol import Cache, Decoder, decoded
from zerojax.generation.sampling import Sampling, sample
from zerojax.matmul.operand import LayerOperand
from zerojax.sharding.mesh import make_mesh

_Graph = nnx.GraphDef[Decoder]


def stream(
    model: nnx.Module,
    prompt: Int[np.ndarray, " prompt"],
    new_tokens: int,
    *,
    key: Key[Array, ""],
    how: Sampling | None = None,
    stop: int | None = None,
) -> Iterator[int]:
    """Continue a prompt, and yield each new token as it is drawn.

    Lengths are rounded up to powers of two, so that a few compiled programs serve all prompts. When the
    context is full, the text continues from its last context_length / 2 tokens.

    Args:
        model: an unsharded model, such as ``zerojax.gather_model(state)``.
        prompt: int32 ids. Of a prompt longer than the context, only the last half of a context is used.
        new_tokens: the most tokens to add.
        key: random key; the same key gives the same text.
        how: temperature, top-k and top-p; None is ``Sampling()``.
        stop: a token that ends the text; it is not yielded.

    Raises:
        ConfigurationError: the prompt is empty, is not a vector, or has ids that the model does not have. Or
            new_tokens is below 1, stop is several tokens, or the model cannot generate.
    """
    context, vocabulary = checked_limits(model)
    if new_tokens < 1:
        raise ConfigurationError(f"new_tokens = {new_tokens} must be at least 1")
    if stop is not None and not isinstance(stop, int | np.integer):
        raise ConfigurationError(f"stop = {stop!r} must be one token, or None")
    (text,) = checked_prompts([prompt], vocabulary)
    graph, weights = _split(model)
    mesh = _mesh(weights)
    response: list[int] = []
    while len(response) < new_tokens:
        earlier = len(response)
        window = np.concatenate([text, np.asarray(response, np.int32)])
        if len(window) > context:
            window = window[-max(1, int(context) // 2) :]
        # The last new token is never an input, so it needs no room in the context.
        limit = int(min(new_tokens - earlier, context - len(window) + 1))
        engine = _engine(model, len(window), limit, context, how)
        queue = engine.queue([window], [0], [limit], 1)
        first, following = (_compiled(run, graph, engine, mesh) for run in (_first, _next))
        token, cache = first(weights, queue, earlier, key)
        for made in range(1, limit + 1):
            last = token
            if made < limit:  # started before the last token is read, so that the device never waits
                token, cache = following(weights, queue, last, earlier, made, cache, key)
            drawn = last.item()
            if drawn == stop:
                return
            yield drawn
            response.append(drawn)


def _split(model: nnx.Module) -> tuple[_Graph, nnx.State]:
    """``nnx.split`` with stacked parameters as ``LayerOperand``.

    Products of a merged model then read each layer's weights in place.
    """
    graph, state = nnx.split(model)
    stacks = [
        (*path, *inner)
        for path, each in nnx.iter_modules(model)
        if isinstance(each, Stack)
        for inner in each.stacked
    ]

    def marked(path: PathParts, variable: object) -> object:
        if isinstance(variable, nnx.Param) and any(path[: len(stack)] == stack for stack in stacks):
            return variable.replace(LayerOperand(variable.get_raw_value()))
        return variable

    flat = [(path, marked(path, variable)) for path, variable in nnx.to_flat_state(state)]
    return cast(_Graph, graph), nnx.from_flat_state(flat)


def _engine(model: nnx.Module, prompt: int, limit: int, context: float, how: Sampling | None) -> Engine:
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    dtype = next(x.dtype.name for x in weights if jnp.issubdtype(x.dtype, jnp.floating))
    new_tokens = padded_length(limit, context)
    return Engine.of(1, prompt, new_tokens, context, dtype=dtype, how=how or Sampling())


def _mesh(weights: nnx.State) -> Mesh:
    """A mesh of one device that holds the weights."""
    placed = next((x for x in jax.tree.leaves(weights) if isinstance(x, jax.Array)), jnp.zeros(()))
    return make_mesh(1, 1, devices=[min(placed.devices(), key=lambda device: device.id)])


@cache
def _compiled(run: Callable[..., object], graph: _Graph, engine: Engine, mesh: Mesh) -> jax.stages.Wrapped:
    """A function of this module, compiled like ``zerojax.generate``'s program."""
    options = compiler_options(mesh, separate_products=True)
    donated = "cache" if run is _next else ()  # without it every token would copy the cache
    return jax.jit(partial(run, graph, engine), donate_argnames=donated, compiler_options=options)


def _first(
    graph: _Graph, engine: Engine, weights: nnx.State, queue: Queue, position: int, key: Key[Array, ""]
) -> tuple[Int[Array, " 1"], Cache]:
    """The first new token of a queue of one row, and the cache of the prompt.

    ``position`` is the token's index in the response.
    """
    last, cache = engine.prefilled(
        lambda *_: nnx.merge(graph, weights), queue.prompts, queue.lengths, engine.length
    )
    return _drawn(nnx.merge(graph, weights), last, queue, position, key, engine), cache


def _next(
    graph: _Graph,
    engine: Engine,
    weights: nnx.State,
    queue: Queue,
    token: Int[Array, " 1"],
    earlier: int,
    made: int,
    cache: Cache,
    key: Key[Array, ""],
) -> tuple[Int[Array, " 1"], Cache]:
    """The token after ``token``, and the cache with ``token``.

    ``made`` tokens were drawn since the prompt was prefilled, and ``earlier`` tokens earlier.
    """
    model = nnx.merge(graph, weights)
    end = queue.lengths + made
    hidden, cache = decoded(model, token[:, None], end - 1, end, cache)
    return _drawn(model, hidden[:, 0], queue, earlier + made, key, engine), cache


def _drawn(
    model: Decoder,
    hidden: Float[Array, "1 width"],
    queue: Queue,
    position: int,
    key: Key[Array, ""],
    engine: Engine,
) -> Int[Array, " 1"]:
    keys = row_keys(key, queue.rows, jnp.full_like(queue.rows, position))
    return sample(model.logits(hidden), keys, engine.how)[0]
