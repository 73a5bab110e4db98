"""Formulas for the bytes of weights and gradients on one device. ``memory.py`` adds them up."""

import math
from collections.abc import Callable, Iterable

import jax.numpy as jnp

from zerojax.analysis.plan.hops import gradient_hops
from zerojax.comm.reduction import GradientReduction
from zerojax.optim.muon import by_shape, most_dealt
from zerojax.sharding.layout import ParamLayout
from zerojax.sharding.mesh import LOCAL, NODE
from zerojax.train.passes import grad_size
from zerojax.train.spec import TrainSpec


class ParamBytes:
    """Bytes of gathered weights, gradients and sums on one device. Bytes of a single leaf are of one layer.

    Attributes:
        sums_sharded: whether each device has a part of the gradients' sums, instead of all of them.
    """

    def __init__(self, spec: TrainSpec) -> None:
        self.spec, self.strategy, self.world = spec, spec.strategy, spec.world
        self.sums_sharded = self.strategy.grad_level != "full"
        rest = [group for group in spec.groups if group.unit is None]
        self._outside = [leaf for group in rest for leaf in group.leaves]
        self._frozen_outside = [leaf for group in rest for leaf in group.frozen]
        stacks = [group.leaves for group in spec.unit_groups if group.stack and group.leaves]
        # Sums that are added to other micro-batches' sums are in fp32.
        if spec.zero.stage < 3 or self.strategy.reads_layers or spec.zero.passes > 1:
            stacks = []
        dtypes = (GradientReduction.of(self.strategy, leaves).sum_dtypes for leaves in stacks)
        self._sum_dtypes = {
            leaf.path: dtype
            for leaves, own in zip(stacks, dtypes, strict=True)
            for leaf, dtype in zip(leaves, own, strict=True)
        }

    def weight(self, leaf: ParamLayout) -> int:
        """Bytes of a gathered leaf, in its compute dtype or in fp8."""
        return leaf.on_device.padded if leaf.fp8 else self.gradient(leaf)

    def gradient(self, leaf: ParamLayout) -> int:
        """Bytes of a whole leaf's gradient, in the compute dtype."""
        return leaf.on_device.padded * leaf.gathered_dtype.itemsize

    def sum_of(self, leaf: ParamLayout) -> int:
        """Bytes of a leaf's gradient sum."""
        item = self._sum_dtypes.get(leaf.path, jnp.dtype(jnp.float32)).itemsize
        return item * (grad_size(self.strategy, leaf) if self.sums_sharded else leaf.shard)

    def gathered(self, units: int) -> int:
        """Bytes of trained weights that are whole at once: at stage 3 some units' and the leaves outside."""
        if self.spec.zero.stage < 3:
            return self._whole(self.spec.leaves)
        return self.outside() + self._largest_units(self.weight, units)

    def outside(self) -> int:
        """Bytes of the trained weights outside units."""
        return self._whole(self._outside)

    def hpz_copy(self) -> int:
        """Bytes of the node-local weights that the forward pass keeps for the backward pass."""
        if (self.strategy.source, self.strategy.keep) != ("primary", "secondary"):
            return 0
        leaves = (leaf for group in self.spec.unit_groups for leaf in group.leaves if not leaf.in_every_node)
        return sum(leaf.layers * self._in_node(leaf) for leaf in leaves)

    def frozen_in_use(self) -> int:
        """Frozen weights in a pass: one unit's are decoded while the next unit's arrive.

        The backward pass reads no frozen weights outside units.
        """
        if not self.spec.unit_groups:
            return self._whole(self._frozen_outside)
        used = self._largest_units(self.weight, frozen=True)
        return used + self._largest_units(self._frozen_on_the_way, frozen=True)

    def frozen_in_forward(self) -> int:
        """Bytes of frozen weights in the forward pass, which gathers the ones outside units at its start."""
        arriving = self._frozen_outside if self.spec.unit_groups else ()
        return self.frozen_in_use() + sum(map(self._frozen_arriving, arriving))

    def frozen_in_loss(self) -> int:
        """Bytes of frozen weights that are whole in the loss: one unit's, and the largest leaf outside."""
        outside = max((self._whole([leaf]) for leaf in self._frozen_outside), default=0)
        return outside + self._largest_units(self.weight, frozen=True)

    def _frozen_on_the_way(self, leaf: ParamLayout) -> int:
        """Bytes of a frozen weight while it is gathered.

        These are the arriving rows, the device's own rows, cut out of the stack, and rows between nodes.
        """
        if not (arriving := self._frozen_arriving(leaf)):
            return 0
        in_node, own = self._in_node(leaf), leaf.weights.local.row_bytes(leaf.shard)
        crossing = self.strategy.frozen == "primary" and self.world.nodes > 1
        return arriving + in_node + (in_node + own) * crossing

    def _frozen_arriving(self, leaf: ParamLayout) -> int:
        """Bytes of a gathered frozen weight before it is decoded; 0 if it is not sent."""
        holders = self.world.size if self.strategy.frozen == "primary" else self.world.local
        return leaf.on_device.world.local * self._in_node(leaf) if holders > 1 else 0

    def whole_gradients(self, *, rest: bool = True) -> int:
        """Gradients before they are summed: all at stages 0 and 1, else one unit's and the rest's.

        ``rest`` counts the leaves outside units. Quantized gradients are encoded leaf by leaf, so only the
        largest leaf's gradient is whole.
        """
        if not self.sums_sharded:
            item = jnp.dtype(self.strategy.grad_dtype).itemsize
            every = sum(leaf.on_device.count * item for leaf in self.spec.leaves)
            return every * (2 if self.spec.zero.passes > 1 else 1)
        outside = self.outside() if rest else 0
        if all(leaf.grads.local.raw for leaf in self.spec.leaves):
            return outside + self._largest_units(self.gradient)
        in_units = (leaf for group in self.spec.unit_groups for leaf in group.leaves)
        return outside + max(map(self.gradient, in_units), default=0)

    def payload(self) -> int:
        """A unit's encoded gradients, sent and arriving. Raw formats need no encoded copy.

        Rotated gradients also exist in fp32 if XLA runs the codec instead of a kernel. Between two hops one
        unit's gradients wait, a second unit's are sent, and a third unit's arrive. Below stage 3 gradients do
        not queue behind the backward pass.
        """
        two_hops = len(GradientReduction(self.strategy, (), self.world).axes) == 2

        def encoded(leaf: ParamLayout) -> int:
            hops = [hop for hop in gradient_hops(self.spec, leaf) if hop.when == "backward"]
            within = sum(hop.payload for hop in hops if LOCAL in hop.axis)
            between = sum(hop.payload for hop in hops if hop.axis == NODE and (two_hops or not hop.summed))
            if leaf.grads.local.raw:
                return 3 * between + two_hops * within
            return 3 * between + 2 * within + (4 * leaf.padded if leaf.rotation else 0)

        return self._largest_units(encoded) if self.spec.zero.stage == 3 else 0

    def sums(self) -> int:
        """Bytes of the sums at ``grad_level``, twice while micro-batches are summed."""
        if self.spec.zero.stage == 0:
            return 0  # the sums replace the gradients in place
        twice = self.spec.zero.passes > 1 and self.sums_sharded
        return self._set_of_sums() * (2 if twice else 1)

    def sums_between_passes(self) -> int:
        """Sums over micro-batches, which exist all the time.

        A backward pass starts from zeros. In all compiled programs examined XLA allocates them before the
        pass if they are wider than a shard.
        """
        if self.spec.zero.stage == 0 or self.spec.zero.passes == 1 or not self.sums_sharded:
            return 0
        return self._set_of_sums() * (1 if self.strategy.grad_level == "primary" else 2)

    def sums_in_nodes(self) -> int:
        """Bytes of the sums that all nodes get once per step, while their owners still hold their own."""
        if self.strategy.sums_in_pass or self.strategy.grad_level != "primary":
            return 0
        return sum(4 * leaf.layers * leaf.owned for leaf in self.spec.leaves if leaf.in_every_node)

    def whole_matrices(self) -> int:
        """Bytes of the whole matrices of one shape in the update, on the device that has the most of them.

        Compiled programs hold them in fp32 before and after orthogonalisation, and in the compute dtype as
        they are sent. If they cross nodes, gradients stay until all matrices are back. Then matrices of other
        shapes are sent and arrive at the same time, and there are three products of a matrix with itself.
        """
        item = jnp.dtype(self.spec.zero.compute_dtype).itemsize
        shapes = by_shape(self.spec.matrices) if self.spec.zero.stage else []
        dealt = [most_dealt(same) * same[0].on_device.padded for same in shapes]
        one_by_one = [(4 + 4 + item) * elements for elements in dealt]
        crossing = [
            (4 + 4) * elements
            + 3 * 4 * most_dealt(same) * _in_products(same[0].on_device)
            + 2 * item * (sum(dealt) - elements)
            for same, elements in zip(shapes, dealt, strict=True)
            if self.world.nodes > 1 and not same[0].in_every_node
        ]
        return max([*one_by_one, *crossing], default=0)

    def _set_of_sums(self) -> int:
        """One set of gradient sums. A stack that the backward pass updates has the sums of one layer."""
        once = {leaf.path for group in self.spec.updated_in_backward for leaf in group.leaves}
        return sum((1 if leaf.path in once else leaf.layers) * self.sum_of(leaf) for leaf in self.spec.leaves)

    def _whole(self, leaves: Iterable[ParamLayout]) -> int:
        """Gathered weights of all layers."""
        return sum(leaf.layers * self.weight(leaf) for leaf in leaves)

    def _in_node(self, leaf: ParamLayout) -> int:
        """Bytes of a weight's node-local part, in its format over ``local``."""
        return self.world.nodes * leaf.weights.local.row_bytes(leaf.shard)

    def _largest_units(
        self, of: Callable[[ParamLayout], int], count: int = 1, *, frozen: bool = False
    ) -> int:
        """The sum of ``of`` over the trained, or frozen, leaves of the ``count`` largest units."""
        units = [
            (sum(map(of, group.frozen if frozen else group.leaves)), group.layers)
            for group in self.spec.unit_groups
        ]
        every = [size for size, copies in units for _ in range(min(copies, count))]
        return sum(sorted(every, reverse=True)[:count])


def _in_products(leaf: ParamLayout) -> int:
    """Elements of the product of a matrix with itself, times the number of experts."""
    return math.prod(leaf.shape[:-2]) * min(leaf.shape[-2:]) ** 2
