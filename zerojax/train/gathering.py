"""The whole model from a train state, and a train state from whole weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.core import FrozenDict
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, PyTree

from zerojax.comm.in_order import on_mesh, one_at_a_time
from zerojax.errors import ConfigurationError
from zerojax.matmul.lora import merged
from zerojax.sharding.layout import ParamLayout, from_stored, to_stored, without_place
from zerojax.sharding.memory import to_device
from zerojax.sharding.mesh import NODE
from zerojax.sharding.param_tree import Path, by_path, from_tree, to_tree
from zerojax.train.blocks import flat_blocks, stored_blocks
from zerojax.train.fields import copied, field_specs
from zerojax.train.frozen import decode_frozen
from zerojax.train.spec import TrainSpec
from zerojax.train.state import TrainState, check_there


def gather_params(state: TrainState) -> dict[str, Any]:
    """The whole model on every host, in the model's own shapes and dtypes, nested by path.

    A Linen module's ``apply`` takes it as its "params". Of an NNX model, lists have keys "0", "1" and so on.

    Leaves are gathered one at a time, so a device holds at most one whole leaf. All processes must call it.
    Frozen weights are decoded, and their adapters merged into them (``W + scale A B``).

    Returns:
        A nested dict of numpy arrays, which share no memory with the state.

    Raises:
        ConfigurationError: the state was donated, or is abstract.

    Examples:
        >>> params = zerojax.gather_params(state)
        >>> params["block"]["up"]["kernel"].shape  # of three layers
        (3, 8, 8)
    """
    return state.spec.adapter.nested(_whole(state))


def _whole(state: TrainState) -> dict[Path, np.ndarray]:
    check_there(state)
    spec = state.spec
    params, stored = from_tree(state.params), from_tree(state.frozen)
    whole = {leaf.path: _gathered(spec, leaf, params[leaf.path]) for leaf in spec.leaves}
    for leaf in spec.frozen:
        weight = _gathered(spec, leaf, stored[leaf.path])
        if adapter := spec.adapters.get(leaf.path):
            assert spec.lora is not None
            a, b = (whole.pop(part.path) for part in adapter)
            weight = merged(weight, a, b, spec.lora, leaf.name)
        whole[leaf.path] = weight
    return whole


def gather_adapters(state: TrainState) -> dict[str, Any]:
    """The adapters on every host, fp32, nested by the path of their weight: "lora_a" and "lora_b".

    All processes must call it.

    Raises:
        ConfigurationError: the state has none, was donated, or is abstract.
    """
    check_there(state)
    spec, params = state.spec, from_tree(state.params)
    parts = [part for pair in spec.adapters.values() for part in pair]
    if not parts:
        raise ConfigurationError("the state has no adapters: create it with lora=.")
    return to_tree({part.path: _gathered(spec, part, params[part.path]) for part in parts})


def gather_model(state: TrainState) -> Any:
    """An ordinary, unsharded model with the state's weights, for sampling or for use without zerojax.

    Returns:
        The ``nnx.Module`` in evaluation mode, or for Linen the module's ``apply`` bound to its variables. It
        shares no memory with the state.

    Raises:
        ConfigurationError: as ``gather_params``.

    Examples:
        >>> whole = zerojax.gather_model(state)
        >>> whole(jnp.ones((2, 8))).shape
        (2, 8)
    """
    spec = state.spec
    weights = {path: jnp.asarray(x) for path, x in _whole(state).items()}
    model_state = jax.tree.map(lambda x: copied(x.addressable_data(0)), state.model_state)
    return spec.adapter.whole(weights, model_state)


def put_params(state: TrainState, params: PyTree) -> TrainState:
    """A state whose master weights are ``params``; the optimizer's state is unchanged.

    It shares all other arrays with ``state``, so a step from one of them donates the arrays of both.

    Args:
        state: any.
        params: on the host, in the model's shapes, nested by path, as ``gather_params`` returns; without
            frozen weights.

    Raises:
        ConfigurationError: a path is missing, unknown, frozen, or of the wrong shape.

    Examples:
        >>> state = zerojax.put_params(state, jax.tree.map(lambda x: 0.9 * x, params))
    """
    if not isinstance(params, dict | FrozenDict):
        raise ConfigurationError(
            f"put_params: params is a {type(params).__name__}, not a dict of arrays nested by path: of a "
            "model, nnx.to_pure_dict(nnx.state(model, nnx.Param)) is one."
        )
    spec, given = state.spec, by_path(params)
    known = {leaf.path: leaf for leaf in spec.leaves}
    if still := [leaf.name for leaf in spec.frozen if leaf.path in given]:
        raise ConfigurationError(
            f"put_params: {still[0]!r} is frozen, and only trained weights are put: leave frozen ones out."
        )
    if given.keys() != known.keys():
        odd = sorted("/".join(path) for path in given.keys() ^ known.keys())
        raise ConfigurationError(
            f"put_params: these paths are missing or unknown: {', '.join(odd[:8])}. Give all trained weights."
        )
    placed = {}
    for path, leaf in known.items():
        if np.shape(given[path]) != leaf.unsharded_shape:
            raise ConfigurationError(
                f"put_params: {leaf.name!r} has shape {np.shape(given[path])}, not {leaf.unsharded_shape}."
            )
        stored = to_stored(np.asarray(given[path], np.float32), leaf)
        placed[path] = jax.device_put(stored, spec.param_sharding(leaf))
    return state.with_params(to_tree(placed))


def averaged(state: TrainState) -> TrainState:
    """A state whose weights are an average, for evaluation or gathering, not for training.

    It is the optimizer's average over steps (``average_weights``). With local updates it is the mean over
    nodes: of their averages, or of their own weights if the optimizer keeps no average. All nodes send 4
    bytes per parameter for it.

    It shares its arrays with ``state``, and is invalid after a step from that.

    Raises:
        ConfigurationError: the optimizer keeps no average and there are no local updates, or it has made no
            update yet.
    """
    check_there(state)
    params = optax.tree_utils.tree_get(state.opt_state, "averaged_params")
    count = optax.tree_utils.tree_get(state.opt_state, "averaged_count")
    local = state.local
    if params is None and local is not None:
        params, count = local.weights, jnp.ones_like(local.skipped_in_row)
    if params is None:
        raise ConfigurationError(
            "there is no average of the weights: end the optimizer's chain with zerojax.average_weights, or "
            "set optimizer.ema_decay."
        )
    if local is not None:
        params, known, count = mean_of_nodes(state.spec, params, count)
        local = dataclasses.replace(local, known=known)
    if not int(count):
        raise ConfigurationError("there is no average of the weights before the first step: take one.")
    if local is None:
        return state.with_params(params)
    return state.replace(params=params, local=local, encoded=state.encoded)


def mean_of_nodes(spec: TrainSpec, averages: PyTree, counts: Array) -> tuple[PyTree, PyTree, Array]:
    """The mean of the averages over the nodes that have one.

    Returns:
        The mean, stored like the outer weights; the mean as every node knows it; and the most updates in an
        average.
    """

    def on_device(averages: PyTree, counts: Array) -> tuple[PyTree, PyTree, Array]:
        there = (counts[0] > 0).astype(jnp.float32)
        nodes = jnp.maximum(lax.psum(there, NODE), 1)
        own = jax.tree.map(lambda x: to_device(x)[0], averages)
        known = jax.tree.map(lambda x: lax.psum(there * x, NODE) / nodes, own)
        blocks = flat_blocks(from_tree(known), spec.leaves)
        mine = {
            path: x.reshape(*x.shape[:-1], spec.world.nodes, -1)[..., lax.axis_index(NODE), :]
            for path, x in blocks.items()
        }
        return to_tree(stored_blocks(mine, spec.leaves)), known, lax.pmax(counts[0], NODE)

    def make() -> jax.stages.Wrapped:
        places = field_specs(spec)
        by_node, everyone = PartitionSpec(NODE), PartitionSpec()
        return jax.jit(
            on_mesh(
                on_device,
                spec.mesh,
                in_specs=(places["local"].weights, by_node),
                out_specs=(places["params"], places["local"].known, everyone),
            )
        )

    return one_at_a_time(spec.mesh, spec.once("mean of nodes", make)(averages, counts))


def _gathered(spec: TrainSpec, leaf: ParamLayout, stored: Any) -> np.ndarray:
    """One whole parameter on this host, in its own dtype."""
    one = without_place(leaf)  # weights of one layout share a compiled function

    def decode(x: Any) -> Array:
        return (decode_frozen(x) if one.frozen else from_stored(to_device(x), one)).astype(one.dtype)

    everyone = spec.sharding(PartitionSpec())
    gather = spec.once_on_mesh(f"gather {one}", lambda: jax.jit(decode, out_shardings=everyone))
    return np.asarray(gather(dataclasses.replace(stored, layout=one) if leaf.frozen else stored))
