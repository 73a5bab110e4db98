"""The update of weights whose masters or moments are in host memory, one layer of a stack at a time.

While layer i is updated, the state of layer i + 1 comes to the device and the state of layer i - 1 goes back
(``zerojax.schedule.streaming``). Norms over the whole tree are computed before (``zerojax.optim.layerwise``).

If masters are in host memory, passes read encoded weights: each shard as its owner sends it next, encoded
when the weight is updated (``Weight.is_encoded``). With delta that is its difference from the node's replica.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float32, PyTree

from zerojax.comm.in_order import on_mesh
from zerojax.comm.xla_options import compiler_options
from zerojax.optim.layerwise import places, with_places
from zerojax.schedule.layer_update import MASTER, LayerState
from zerojax.schedule.streaming import layer_at, over_host_layers
from zerojax.sharding.layers import Index, empty_layers
from zerojax.sharding.layout import ParamLayout, in_a_row
from zerojax.sharding.memory import in_host, to_device, to_host, to_memory_of
from zerojax.sharding.mesh import NODE
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.train.fields import Trained, abstract_encoded, shardings_of, specs_of
from zerojax.train.pass_weights import ByPath, encoded_layer
from zerojax.train.spec import ParamGroup, TrainSpec
from zerojax.weights import Weight

_Place = tuple[str, ...]
"""Place of a stored array: ("params", *path), or ("state", its place in the optimizer's state)."""
_Stored = dict[_Place, Float32[Array, "..."]]
_GROUPS_AT_ONCE = 2
"""Groups of weights on the device at once: one is updated while the next one is fetched."""


def updated_by_layers(
    spec: TrainSpec,
    ok: Bool[Array, ""],
    sums: PyTree[Array],
    tokens: Float32[Array, ""],
    before: Trained,
    replicas: ByPath,
    done: Mapping[Path, LayerState],
) -> tuple[PyTree[Array], PyTree[Array], ByPath]:
    """Update all weights, or none.

    Args:
        spec: the train spec.
        ok: whether the step is taken.
        sums: gradients summed over all tokens, stored like the weights, on the device.
        tokens: the number of tokens.
        before: the fields before the step. Master weights and moments are in either memory; the new encoded
            weights take the memory of the previous ones.
        replicas: delta's replicas after the passes; or empty.
        done: the arrays that the backward pass has updated, which have no entry in ``sums``.

    Returns:
        The new weights, the new state, and the new encoded weights.

    Raises:
        ConfigurationError: the optimizer cannot update layers by themselves.
    """
    optimizer = spec.layerwise
    assert optimizer is not None
    paths = optimizer.moments
    state, masters, gradients = places(before.opt_state), from_tree(before.params), from_tree(sums)
    counters = {place: x for place, x in state.items() if place not in paths}
    with jax.named_scope("optimizer"):
        reduced = optimizer.reduce(jax.tree.map(lambda x: x / tokens, sums), counters)
        others = {place: jnp.where(ok, x, counters[place]) for place, x in reduced.others.items()}

    def updated(group: ParamGroup, stored: _Stored) -> tuple[_Stored, ByPath, ByPath]:
        mine = [leaf.path for leaf in group.leaves]
        own = _rows(group, {path: gradients[path] for path in mine})

        def update(index: Index, have: _Stored) -> _Stored:
            with jax.named_scope("optimizer"):
                weights = {path: have["params", *path] for path in mine}
                moments = {place[1]: x for place, x in have.items() if place[0] == "state"}
                # Each layer is divided by itself: divided before the loop, all would exist twice.
                given = {path: x / tokens for path, x in _layer(group, own, index).items()}
                weights, moments = optimizer.update(reduced, given, counters | moments, weights)
                new: _Stored = {("params", *path): x for path, x in weights.items()}
                new |= {("state", place): x for place, x in moments.items()}
                return {place: jnp.where(ok, x, have[place]) for place, x in new.items()}

        return _over_layers(spec, group, stored, before.encoded, replicas, update)

    def stored_of(group: ParamGroup) -> _Stored:
        mine = [leaf.path for leaf in group.leaves]  # in order: every process traces the same program
        stored: _Stored = {("params", *path): masters[path] for path in mine}
        return stored | {("state", place): state[place] for place, path in paths.items() if path in mine}

    stored, fresh = _over_groups(spec, stored_of, updated, begin=ok, skip=spec.updated_in_backward)
    weights = {place[1:]: x for place, x in stored.items() if place[0] == "params"}
    moments = {place[1]: x for place, x in stored.items() if place[0] == "state"}
    for path, own in done.items():
        weights[path] = own.held[MASTER]
        moments |= {place: x for place, x in own.held.items() if place != MASTER}
        fresh[path] = dataclasses.replace(before.encoded[path], values=own.encoded, scale=own.scale)
    return to_tree(weights), with_places(before.opt_state, others | moments), fresh


def first_encoded(spec: TrainSpec, params: PyTree[Array], replicas: ByPath) -> ByPath:
    """The encoded weights of a state, by a function that is compiled once.

    Args:
        spec: the train spec.
        params: the master weights, in host memory; with local updates each node's own.
        replicas: delta's replicas; or empty.
    """
    own = spec.training

    def run(params: PyTree[Array], replicas: ByPath) -> ByPath:
        masters = from_tree(params)

        def encoded(group: ParamGroup, stored: _Stored) -> tuple[_Stored, ByPath, ByPath]:
            return _over_layers(own, group, stored, None, replicas, None)

        def stored_of(group: ParamGroup) -> _Stored:
            return {("params", *leaf.path): masters[leaf.path] for leaf in group.leaves}

        return _over_groups(own, stored_of, encoded)[1]

    def make() -> jax.stages.Wrapped:
        places, options = shardings_of(abstract_encoded(spec)), compiler_options(spec.mesh, host_memory=True)
        each = jax.vmap(run, spmd_axis_name=NODE) if spec.local_updates else run
        return jax.jit(each, out_shardings=places, compiler_options=options)

    return spec.once("encoded", make)(params, replicas)


def _over_groups(
    spec: TrainSpec,
    stored_of: Callable[[ParamGroup], _Stored],
    run: Callable[[ParamGroup, _Stored], tuple[_Stored, ByPath, ByPath]],
    *,
    begin: Bool[Array, ""] | None = None,
    skip: Collection[ParamGroup] = (),
) -> tuple[_Stored, ByPath]:
    """Run all groups, one after another. A group is fetched once the group two places before it is done.

    The first groups are fetched at any time, except that groups outside stacks, which are fetched whole, wait
    for ``begin``.
    """
    after: _Stored = {}
    fresh: ByPath = {}
    done: list[tuple[ByPath, list[Array]]] = []
    for group in spec.groups:
        if not group.leaves or group in skip:
            continue
        of_first = None if group.stack else begin
        known = done[-_GROUPS_AT_ONCE] if len(done) >= _GROUPS_AT_ONCE else of_first
        # Without the barrier XLA could fetch everything at the beginning of a step, and hold it to the end.
        stored, _ = lax.optimization_barrier((stored_of(group), known))
        stored, sent, last = run(group, stored)
        done.append((last, [x for x in stored.values() if not in_host(x)]))
        after |= stored
        fresh |= sent
    return after, fresh


def _over_layers(
    spec: TrainSpec,
    group: ParamGroup,
    stored: _Stored,
    encoded: ByPath | None,
    replicas: ByPath,
    update: Callable[[Index, _Stored], _Stored] | None,
) -> tuple[_Stored, ByPath, ByPath]:
    """Update and encode every layer of a group.

    Args:
        spec: the train spec.
        group: the group.
        stored: its arrays, of all layers.
        encoded: arrays that the results replace; or None.
        replicas: delta's replicas of all weights; or empty.
        update: from a layer's index and its arrays to the new ones; None leaves them unchanged.

    Returns:
        The arrays, each in its memory; the encoded weights; and the last layer's encoded weights.
    """
    leaves = group.leaves if spec.in_host("masters") else ()
    mine = _rows(group, {leaf.path: replicas[leaf.path] for leaf in leaves if leaf.path in replicas})

    def compute(index: Index, have: _Stored) -> tuple[_Stored, ByPath]:
        new = have if update is None else update(index, have)
        return new, _encode_layer(spec, leaves, new, _layer(group, mine, index))

    if not group.stack:
        new, last = compute(0, to_device(stored))
        return to_memory_of(new, stored), _weights(spec, leaves, last), last
    if encoded is None:
        one = jax.eval_shape(lambda: compute(0, layer_at(_rows(group, stored), 0))[1])
        into = empty_layers(one, group.layers)
    else:
        into = _rows(group, {leaf.path: _of_layer(encoded[leaf.path]) for leaf in leaves})
    rows, sent, last = over_host_layers(
        group.layers, _rows(group, stored), into, compute, stores=update is not None
    )
    stored = {place: x.reshape(stored[place].shape) for place, x in rows.items()}
    return stored, _weights(spec, leaves, sent), last


def _encode_layer(
    spec: TrainSpec, stacked: Sequence[ParamLayout], stored: _Stored, replicas: ByPath
) -> ByPath:
    """One layer's encoded weights, from the masters in ``stored``."""
    masters = {
        leaf.path: _of_layer(Weight(stored["params", *leaf.path], leaf, "primary")) for leaf in stacked
    }
    copies = {path: _of_layer(replicas[path]) for path in masters if path in replicas}
    own = {path: w.replace(w.layout.spec(w.layout.owners)) for path, w in masters.items()}
    in_node = specs_of({path: spec.stored(w.layout, "secondary") for path, w in copies.items()})
    after = {
        path: dataclasses.replace(w, scale=PartitionSpec() if w.layout.fp8 else None, is_encoded=True)
        for path, w in own.items()
    }
    run = on_mesh(encoded_layer, spec.mesh, in_specs=(own, in_node), out_specs=after)
    return run(masters, copies)


def _of_layer(w: Weight) -> Weight:
    """A weight whose layout has no layers."""
    return dataclasses.replace(w, layout=dataclasses.replace(w.layout, stack=()))


def _rows[T: PyTree[Array]](group: ParamGroup, tree: T) -> T:
    """Arrays of a stack with one axis of layers; arrays that are no stack are returned unchanged."""
    return jax.tree.map(lambda x: in_a_row(x, group.stack), tree) if group.stack else tree


def _layer[T: PyTree[Array]](group: ParamGroup, rows: T, index: Index) -> T:
    """A layer of ``_rows``; arrays that are no stack are returned unchanged."""
    return layer_at(rows, index) if group.stack else rows


def _weights(spec: TrainSpec, leaves: Sequence[ParamLayout], sent: ByPath) -> ByPath:
    """Encoded weights as a state has them."""
    found: ByPath = {}
    for leaf in leaves:
        like = spec.stored(leaf, "primary", "encoded")
        values = sent[leaf.path].values.reshape(like.values.shape)
        values = to_host(values) if spec.in_host("encoded") else values
        scale = sent[leaf.path].scale.reshape(leaf.stack) if leaf.fp8 else None
        found[leaf.path] = dataclasses.replace(like, values=values, scale=scale)
    return found
