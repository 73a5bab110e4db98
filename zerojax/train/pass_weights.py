"""The weights that a pass begins with, on one device, and the forms in which the model gets them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerojax.schedule.sharded import Sharded
from zerojax.schedule.unit import materialise
from zerojax.sharding.layout import from_stored
from zerojax.sharding.param_tree import Path, from_tree
from zerojax.train.blocks import by_group
from zerojax.train.copies import ByPath, masters_of, up_to_date
from zerojax.train.fields import Shards
from zerojax.train.spec import ParamGroup, TrainSpec
from zerojax.weights.gather import to_full, to_secondary
from zerojax.weights.weight import Weight, Weights


class PassWeights(NamedTuple):
    """The weights that a pass begins with.

    Attributes:
        weights: per path, trained and frozen, at the level where units find them.
        masters: per path this device's part of a trained weight.
        copies: the state's copies in every node, up to date but for those that units update.
        updating: the paths of the weights whose copies are updated by units.
    """

    weights: ByPath
    masters: ByPath
    copies: ByPath
    updating: frozenset[Path]


def pass_weights(spec: TrainSpec, shards: Shards, *, updating: Sequence[ParamGroup] = ()) -> PassWeights:
    """The weights of a state, with which a pass begins.

    Unless the state's copies have the values of its master weights, the ``updating`` units update delta's
    copies themselves.
    """
    units = (leaf.path for group in updating for leaf in group.leaves)
    later = frozenset(() if shards.current_copies else shards.copies.keys() & units)
    owned, copies = up_to_date(spec, shards, later=later)
    begun = {path: copy for path, copy in copies.items() if path not in later}
    if not begun:
        begun = _whole(spec, shards, owned) if spec.strategy.source == "full" else {}
    masters = masters_of(spec, shards.params)
    return PassWeights(owned | from_tree(shards.frozen) | begun, masters, copies, later)


def _whole(spec: TrainSpec, shards: Shards, owned: ByPath) -> ByPath:
    """Whole weights, for stages 0 to 2, at which every device has them throughout a step."""
    dtype = spec.strategy.weight_dtype
    if spec.zero.stage == 0:
        params = from_tree(shards.params)
        return {
            leaf.path: Weight(from_stored(params[leaf.path], leaf).astype(dtype(leaf)), leaf, "full")
            for leaf in spec.leaves
        }

    def gather(weights: Weights) -> Weights:
        return to_full(to_secondary(weights), dtype)

    return by_group(spec, gather, owned)


def place_group(
    spec: TrainSpec, group: ParamGroup, sharded: Mapping[Path, Sharded], *, train: bool, adapters: bool = True
) -> dict[Path, Any]:
    """A group's weights in the form that the model gets: joined with their adapters, and whole outside units.

    ``sharded`` has the matrices of their adapters, too, which drop out if the model is to ``train``.
    """
    joined = dict(sharded)
    for leaf in group.frozen:
        parts = [joined.pop(part.path, None) for part in spec.adapters.get(leaf.path, ())]
        adapter = tuple(part for part in parts if part is not None)
        if adapter and adapters:
            assert spec.lora is not None
            lora = spec.lora if train else dataclasses.replace(spec.lora, dropout=0.0)
            joined[leaf.path] = dataclasses.replace(joined[leaf.path], adapter=adapter, lora=lora)
    values: Sequence[Any] = list(joined.values())
    if group.unit is None:
        values = materialise(values)
    return dict(zip(joined, values, strict=True))
