"""The weights that a pass begins with, on one device, and the forms in which the model gets them.

Replicas are secondary partitions of ZeRO++ (section 3.2) that a state holds in every node, with the scales
that fp8 products need. Delta keeps them from step to step, one update behind the master weights (SDP4Bit,
section 3.1). ``zerojax.train.replica`` makes them of the current weights, for several passes.
"""

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, PyTree

from zerojax.comm.in_order import on_mesh
from zerojax.matmul import fp8
from zerojax.sharding.layout import from_stored
from zerojax.sharding.memory import to_device
from zerojax.sharding.param_tree import Path, from_tree, to_tree
from zerojax.train.blocks import by_group
from zerojax.train.fields import Shards, abstract_replicas, specs_of
from zerojax.train.spec import ParamGroup, TrainSpec
from zerojax.weights import Payloads, Weight, Weights, beside, gather_exact, to_full, to_secondary

ByPath = dict[Path, Weight]
"""Weights by path: of a state, or of one device."""


def masters_of(spec: TrainSpec, params: PyTree[Array]) -> ByPath:
    """This device's shards of a state's master weights.

    At stage 0 the state has all shards on every device, and a device's own are cut out.
    """
    own, blocks = {}, from_tree(params)
    for leaf in spec.leaves:
        shard = to_device(blocks[leaf.path]).reshape(*leaf.stack, -1)
        if spec.zero.stage == 0:
            first = lax.axis_index(leaf.world.owners) * leaf.shard
            shard = lax.dynamic_slice_in_dim(shard, first, leaf.shard, axis=-1)
        own[leaf.path] = Weight(shard, leaf, "primary")
    return own


def with_scales(masters: ByPath, replicas: ByPath) -> tuple[ByPath, ByPath]:
    """Give the weights of fp8 products their scales, from each weight's largest magnitude over all owners.

    Delta's replicas keep their scales until they no longer fit, so that codes rarely change all at once.
    Masters that are already encoded have their scales.

    Args:
        masters: all trained weights, or the ones that have no replica in every node.
        replicas: replicas.

    Returns:
        Both, with the same scales.
    """
    chosen = [w.layout for w in masters.values() if w.layout.fp8]
    if not chosen:
        return masters, replicas
    if all(masters[leaf.path].is_encoded for leaf in chosen):
        given = {leaf.path: masters[leaf.path].scale for leaf in chosen if leaf.path in replicas}
        return masters, replicas | {path: rescaled(replicas[path], scale) for path, scale in given.items()}
    own = [jnp.max(jnp.abs(masters[leaf.path].values), axis=-1).reshape(-1) for leaf in chosen]
    with jax.named_scope("scales"):
        peaks = lax.pmax(jnp.concatenate(own), max((leaf.owners for leaf in chosen), key=len))
    ends = list(itertools.accumulate(leaf.layers for leaf in chosen))
    scaled, renewed = dict(masters), dict(replicas)
    for leaf, peak in zip(chosen, jnp.split(peaks, ends[:-1]), strict=True):
        replica = replicas.get(leaf.path)
        scale = scale_of(peak.reshape(leaf.stack), replica)
        if replica is not None:
            renewed[leaf.path] = rescaled(replica, scale)
        scaled[leaf.path] = Weight(masters[leaf.path].values, leaf, "primary", scale)
    return scaled, renewed


def encoded_layer(masters: ByPath, replicas: ByPath) -> ByPath:
    """One layer's weights as their owners send them next, on one device.

    ``masters`` are this device's, in any shape; ``replicas`` are delta's after the passes, or none.
    """
    flat = {path: w.replace(w.values.reshape(-1)) for path, w in masters.items()}
    scaled, replicas = with_scales(flat, replicas)
    before = {path: copy.values for path, copy in replicas.items()}
    return {
        path: dataclasses.replace(
            w, values=dataclasses.replace(w, replica=before.get(path)).sent(), is_encoded=True
        )
        for path, w in scaled.items()
    }


def scale_of(peak: Float32[Array, "*layers"], replica: Weight | None) -> Float32[Array, "*layers"]:
    """The scale for fp8 products from the largest magnitude of weights; the replica's scale, if it fits."""
    scale = fp8.scale_for(peak, fp8.E4M3)
    if replica is None:
        return scale
    return jnp.where((scale >= replica.scale) & (scale <= 4 * replica.scale), replica.scale, scale)


def rescaled(replica: Weight, scale: Float32[Array, "*layers"]) -> Weight:
    """Delta's replica, with its fp8 codes encoded again for another scale."""

    def change() -> Array:
        return fp8.encode(fp8.decode(replica.values, jnp.float32), (scale / replica.scale)[..., None])

    codes = lax.cond(jnp.any(scale != replica.scale), change, lambda: replica.values)
    return Weight(codes, replica.layout, replica.level, scale)


def replicas_of(spec: TrainSpec, params: PyTree) -> ByPath:
    """Delta's replicas, made from global master weights: for a new state, other weights, or a new mesh."""

    def local(params: PyTree[Array]) -> ByPath:
        masters, _ = with_scales(masters_of(spec, params), {})
        exact = by_group(spec, gather_exact, _of(abstract_replicas(spec), masters))
        return {path: masters[path].replace(x, "secondary") for path, x in exact.items()}

    given = (to_tree(spec.by_path(spec.param_spec)),)
    return on_mesh(local, spec.mesh, in_specs=given, out_specs=specs_of(abstract_replicas(spec)))(params)


def refreshed(spec: TrainSpec, masters: ByPath, replicas: ByPath, step: Array) -> ByPath:
    """Delta's replicas, refreshed by the change of the weights, or resynchronised."""
    owned = _of(replicas, masters)

    def update() -> dict[Path, Array]:
        return by_group(spec, _updated, owned, {path: replica.values for path, replica in replicas.items()})

    if every := spec.zero.delta_resync:
        due = (step > 0) & (step % every == 0)
        values = lax.cond(due, lambda: by_group(spec, gather_exact, owned), update)
    else:
        values = update()
    return {path: replicas[path].replace(x) for path, x in values.items()}


def up_to_date(spec: TrainSpec, shards: Shards, *, later: Collection[Path] = ()) -> tuple[ByPath, ByPath]:
    """This device's shards of the trained weights as a pass reads them, and the replicas for it.

    The shards are master values, or already encoded. ``later`` replicas are not refreshed, unless all
    replicas are current.
    """
    owned, replicas = shards.encoded or masters_of(spec, shards.params), shards.replicas
    if shards.current_replicas:
        others = {path: weight for path, weight in owned.items() if path not in replicas}
        return owned | with_scales(others, {})[0], replicas
    owned, replicas = with_scales(owned, replicas)
    now = {path: replica for path, replica in replicas.items() if path not in later}
    return owned, (replicas | refreshed(spec, owned, now, shards.step)) if now else replicas


def secondary_partitions(spec: TrainSpec, shards: Shards) -> ByPath:
    """Every weight as a node holds it, with the values that the next forward pass computes with."""
    (owned, replicas), frozen = up_to_date(spec, shards), from_tree(shards.frozen)
    lacking = {
        path: weight
        for path, weight in (owned | frozen).items()
        if weight.level == "primary" and path not in replicas
    }
    return frozen | by_group(spec, to_secondary, lacking) | replicas


def _updated(weights: Weights, replicas: Payloads) -> list[Array]:
    return [w.values for w in to_secondary(beside(weights, replicas))]


def _of(paths: Collection[Path], weights: ByPath) -> ByPath:
    return {path: weight for path, weight in weights.items() if path in paths}


class PassWeights(NamedTuple):
    """The weights with which a pass begins.

    Attributes:
        weights: by path, trained and frozen, at the level where units receive them.
        masters: by path, this device's part of each trained weight.
        replicas: the state's replicas, refreshed unless the unit of the weight does so.
    """

    weights: ByPath
    masters: ByPath
    replicas: ByPath


def pass_weights(spec: TrainSpec, shards: Shards, *, updating: Sequence[ParamGroup] = ()) -> PassWeights:
    """The weights of a state with which a pass begins.

    The ``updating`` units refresh delta's replicas themselves, unless the replicas are current.
    """
    units = (leaf.path for group in updating for leaf in group.leaves)
    later = set() if shards.current_replicas else shards.replicas.keys() & units
    owned, replicas = up_to_date(spec, shards, later=later)
    started = {
        path: dataclasses.replace(owned[path], replica=replica.values) if path in later else replica
        for path, replica in replicas.items()
    }
    if not started:
        started = _whole(spec, shards, owned) if spec.strategy.source == "full" else {}
    return PassWeights(owned | from_tree(shards.frozen) | started, masters_of(spec, shards.params), replicas)


def _whole(spec: TrainSpec, shards: Shards, owned: ByPath) -> ByPath:
    """Whole weights, for stages 0 to 2, where every device holds them throughout a step."""
    if spec.zero.stage == 0:
        params = from_tree(shards.params)
        return {
            leaf.path: Weight(from_stored(params[leaf.path], leaf).astype(leaf.gathered_dtype), leaf, "full")
            for leaf in spec.leaves
        }

    def gather(weights: Weights) -> Weights:
        return to_full(to_secondary(weights))

    return by_group(spec, gather, owned)
