"""The first values of a train state, each computed where it is stored."""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from zerojax.adapters.adapter import ModelState
from zerojax.sharding.layout import ParamLayout, to_stored
from zerojax.sharding.memory import HOST, to_device
from zerojax.sharding.param_tree import Path, to_tree
from zerojax.train.fields import abstract_fields, abstract_losses, first_local, shardings_of
from zerojax.train.frozen import encode_frozen
from zerojax.train.pass_weights import replicas_of
from zerojax.train.spec import TrainSpec

_AT_ONCE = 8 << 30
"""Bytes of a device's arrays that are made at once, if some are for host memory; or one larger array."""


def initializer(spec: TrainSpec) -> Any:
    """The compiled function from a seed to a state's first values, each computed where it is stored.

    It leaves out the frozen weights, for which there is ``base_initializer``.
    """
    places = shardings_of(abstract_fields(spec))

    def on_device(leaf: ParamLayout) -> NamedSharding:
        return spec.sharding(spec.param_spec(leaf))

    def init(seed: Array) -> dict[str, Any]:
        key = jax.random.key(seed)
        weights, model_state = spec.adapter.init(key)
        weights |= adapter_values(spec, key)
        stored = to_tree(
            {leaf.path: to_stored(weights[leaf.path].astype(jnp.float32), leaf) for leaf in spec.leaves}
        )
        stored = jax.lax.with_sharding_constraint(stored, to_tree(spec.by_path(on_device)))
        return {"params": stored, **first_values(spec, seed, stored, model_state)}

    # The encoded weights follow from the others (``state.encoded_fields``).
    del places["encoded"], places["frozen"], places["base"]
    return in_portions(init, places)


def base_initializer(spec: TrainSpec) -> Callable[[np.uint32], dict[str, Any]]:
    """The compiled function from a seed to the fields "frozen" and "base".

    A run that resumes draws its frozen weights again. Two programs may round the same numbers differently, so
    this one draws them each time.
    """
    places = {name: shardings_of(abstract_fields(spec)[name]) for name in ("frozen", "base")}

    def init(seed: Array) -> dict[str, Any]:
        return frozen_values(spec, spec.adapter.init(jax.random.key(seed))[0])

    return in_portions(init, places)


def in_portions[T](init: Callable[..., T], places: T) -> Callable[..., T]:
    """A compiled function that makes a state's fields; arrays for host memory are made a few at a time.

    They are computed on the device, which need not have room for all of them at once.

    The results of ``init`` do not depend on each other; ``places`` are their shardings.
    """
    whole = jax.jit(init, out_shardings=places)
    shardings, structure = jax.tree.flatten(places)
    if not any(place.memory_kind == HOST for place in shardings):
        return whole

    def run(*args: PyTree[Array]) -> T:
        shapes = jax.tree.leaves(jax.eval_shape(init, *args))
        sizes = [
            math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize
            for x, place in zip(shapes, shardings, strict=True)
        ]
        begins = itertools.accumulate(sizes, initial=0)
        portions: dict[int, list[int]] = {}
        for i, begin in zip(range(len(sizes)), begins, strict=False):
            portions.setdefault(begin // _AT_ONCE, []).append(i)
        if len(portions) == 1:
            return whole(*args)

        def made(portion: list[int]) -> list[Array]:
            def some(*args: PyTree[Array]) -> list[Array]:
                every = jax.tree.leaves(init(*args))
                return [every[i] for i in portion]

            compiled = jax.jit(some, out_shardings=[shardings[i] for i in portion])
            return jax.block_until_ready(compiled(*args))

        return jax.tree.unflatten(structure, itertools.chain(*map(made, portions.values())))

    return run


def adapter_values(spec: TrainSpec, key: Array) -> dict[Path, Array]:
    """The first A and B of all adapters, by path, each of unsharded shape."""
    values: dict[Path, Array] = {}
    for leaf in spec.frozen:
        if leaf.path in spec.adapters:
            assert spec.lora is not None
            own = spec.lora.init(jax.random.fold_in(key, leaf.index), leaf.name, leaf.shape, leaf.stack)
            values |= {(*leaf.path, name): value for name, value in own.items()}
    return values


def frozen_values(spec: TrainSpec, weights: Mapping[Path, Array]) -> dict[str, Any]:
    """The state's fields "frozen" and "base", from a model's weights of unsharded shape."""
    if not spec.frozen:
        return {"frozen": {}, "base": {}}
    encoded = {leaf.path: encode_frozen(spec, leaf, weights[leaf.path]) for leaf in spec.frozen}
    total = sum((hashed for _, hashed in encoded.values()), jnp.uint32(0))
    return {
        "frozen": to_tree({path: stored for path, (stored, _) in encoded.items()}),
        "base": {"fingerprint": total},
    }


def first_values(spec: TrainSpec, seed: Array, stored: PyTree, model_state: ModelState) -> dict[str, Any]:
    """Every field at step 0, except the parameters and the encoded weights."""
    residual = abstract_fields(spec)["residual"]
    return {
        "step": jnp.int32(0),
        "skipped_in_row": jnp.int32(0),
        "seed": seed.astype(jnp.uint32),
        "opt_state": spec.first_opt_state(to_device(stored)),
        "model_state": model_state,
        "replicas": replicas_of(spec, stored) if spec.zero.weights_delta else {},
        "residual": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), residual),
        "losses": jax.tree.map(
            lambda x, like: jnp.broadcast_to(x, like.shape), spec.spikes.start(), abstract_losses(spec)
        )
        if spec.spikes
        else {},
        "local": first_local(spec, stored) if spec.local_updates else None,
    }
