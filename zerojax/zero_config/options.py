"""The sharding options in groups, which ``ZeroConfig`` joins. Their fields are the keys of [zero]."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import numpy as np

from pallas_kernels.formats import Format

MATMUL_WEIGHTS = ("*kernel", "!*embed*", "!*lm_head*", "!*norm*", "!*router*")
"""The kernels of a model's blocks: the default of ``ZeroConfig.fp8`` and ``LoRA.targets``."""

FloorFormat = Literal[Format, "float32", "bfloat16"]
"""The formats of ``pallas_kernels.FORMATS``, and other names of the first two."""
WireFormat = Literal["compute", FloorFormat]
"""The same, and "compute" for None."""
FrozenFormat = Literal[WireFormat, "nf4"]
ComputeDtype = Literal["float32", "bfloat16", "fp32", "bf16"] | type[np.generic] | np.dtype
AccumulateOrder = Literal["depth", "breadth"]
Spread = Literal["node", "world"]
Moments = Literal["float32", "bfloat16", "float8"]
ExpertSpread = Literal["auto", "local", "gathered"]
Stored = Literal["masters", "moments", "encoded", "frozen", "activations"]
"""Arrays that are in the device's memory or in its host's."""
HostStore = Literal["optimizer", "weights", "activations"]
HOST_STORES: Mapping[HostStore, tuple[Stored, ...]] = MappingProxyType(
    {
        "optimizer": ("masters", "moments"),
        "weights": ("encoded", "frozen"),
        "activations": ("activations",),
    }
)
"""The arrays that each value of ``Memory.host`` puts in host memory."""
GradSync = Literal["micro", "step"]
MatmulDtype = Literal["compute", "fp8"]
Remat = Literal["full", "attention", "none"]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """The device that holds each weight, and the weights that are trained.

    Attributes:
        stage: 0 replicates everything, 1 shards the optimizer, 2 also the gradients, 3 also the
            parameters (ZeRO, Rajbhandari et al.).
        units: module classes whose weights are gathered just before use and dropped after
            (``zerojax.Stack`` needs no mention); one class, or a list, is kept as a tuple. Without any, the
            whole model is one unit.
        hpz: keep the secondary partition within the node for the backward pass (ZeRO++ section 3.2).
        state_spread: where the master weights and the optimizer's state are, at stage 3. "world": once, over
            all devices. "node": in each node, which then holds nothing that the others lack. Gradient sums
            go to all nodes in place of the weights, in the weights' format, or in the gradients' format if
            that has more bits. A step of "delta" sends as much as with "world".
        matrix_spread: where a matrix that the optimizer needs whole (Muon) has its master weight and
            momentum, at stage 3. "node": in each node, so that neither the weight nor its update crosses
            nodes, and a step sends no more than with AdamW. "world": over all devices, which saves memory;
            the momentum and the update then cross nodes in the compute format.
        experts: where the weights of experts (``zerojax.Experts``) are whole. "local" spreads them over the
            devices of a node. A device then holds some of the experts and receives the tokens for them, so
            that neither these weights nor their gradients travel within a node. "gathered" gathers them for
            every device like other weights. "auto" is "local" if the devices of a node divide the experts.
        sequence_parallel: how many neighbouring devices of a node share a row of tokens: 1, or a divisor of
            the devices of a node. Each computes with its part of the tokens, and attention exchanges heads
            between them (``zerojax.attention``); nothing more crosses nodes.
        frozen: shell patterns of paths, read like ``fp8``: the weights that are not trained. They have no
            master weight, optimizer state or gradient. Needs stage 3. In a config with adapters ([lora]), all
            weights by default.
        frozen_weights: the format in which frozen weights are stored and gathered over ``local``: a wire
            format or "nf4" (QLoRA; blocks of 64). ``precise`` holds for them too.
        frozen_spread: where a frozen weight is stored once. "node": in each node, so that it never crosses
            nodes. "world": over all devices, which saves memory; the forward and the backward pass then also
            gather it over ``node``.
    """

    stage: Literal[0, 1, 2, 3] = 3
    units: tuple[type, ...] = field(default=(), metadata={"key": None})  # from the model
    hpz: bool = False
    state_spread: Spread = "world"
    matrix_spread: Spread = "node"
    experts: ExpertSpread = "auto"
    sequence_parallel: int = 1
    frozen: tuple[str, ...] = ()
    frozen_weights: FrozenFormat | None = None
    frozen_spread: Spread = "node"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """The formats in which weights and gradients cross each mesh axis, and how often they do.

    Formats are "fp32", "bf16", "fp8", "int8", "fp6", "int4" and "int2"; "float32", ``jnp.bfloat16`` and the
    like are other names of the first two. "compute", or None, is the format of ``compute_dtype``: the values
    that the model computes with, unchanged.

    Attributes:
        weights: format of the weight all-gather over ``node`` (qwZ, ZeRO++ section 3.1).
        weights_delta: keep the secondary partition from step to step, as the node's replica, and send only
            the change of the weights, once per optimizer step (needs ``hpz``).
        delta_resync: with ``weights_delta``, send the whole weights in the local format every n
            steps; 0 never.
        local_weights: format of the all-gather over ``local`` and of the stored secondary partition.
        grads: formats of the gradient hops over ``local`` and over ``node`` (qgZ, section 3.3).
        grads_hops: 2, or 1 for a single all-to-all over both axes (the paper's Figure 3).
        grad_sync: "micro" sends gradients over ``node`` in every micro-batch, "step" once per step.
        block_size: elements that share a scale; a power of two from 64 to 2048, best a divisor of the
            model's width.
        rounding: of gradients: "nearest" (half to even) or "stochastic" (a counter hash: reproducible,
            unbiased). Weights are always rounded to nearest, which keeps their error bound smallest.
        rotation: 32 rotates gradients by a 32-wide Hadamard matrix before encoding; 0 does not.
        error_feedback: add the error of the node hop's encoding to the next step's gradient.
        chunks: the number of pipeline stages into which the two gradient hops are cut.
        precise: ``(pattern, format)`` pairs: where a leaf's path ("blocks/attn/kernel") matches the
            shell pattern, neither its weight nor its gradient travels in fewer bits than ``format``.
            Vectors and scalars always travel in the compute format. By default embeddings: a rare
            token's gradient, in one block with a frequent one's, would round to zero in four bits.
    """

    weights: WireFormat | None = None
    weights_delta: bool = False
    delta_resync: int = 0
    local_weights: WireFormat | None = None
    grads: tuple[WireFormat | None, WireFormat | None] = (None, None)
    grads_hops: Literal[1, 2] = 2
    grad_sync: GradSync = "micro"
    block_size: int = 256
    rounding: Rounding = "nearest"
    rotation: Literal[0, 32] = 0
    error_feedback: bool = False
    chunks: int = 1
    precise: tuple[tuple[str, FloorFormat], ...] = (("*embed*", "int8"), ("*router*", "bf16"))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The dtype of the computation, its order, and what the backward pass computes again.

    Attributes:
        compute_dtype: the dtype of the gathered weights: bfloat16 or float32, as a name ("bfloat16", "bf16")
            or a dtype (``jnp.bfloat16``); kept as the long name. Master weights are always fp32.
        matmul_dtype: "compute", or "fp8", which needs stage 3 (``zerojax.matmul.fp8``). With "fp8", matmuls
            with the weights that ``fp8`` names are computed in 8-bit floating point, forward and backward.
            These weights cross ``local`` in the form that such a matmul reads. They cross ``node`` in that
            form too, unless differences or fewer than 8 bits are sent there.
        fp8: shell patterns of paths: with ``matmul_dtype="fp8"`` the weights to use it for, among the
            two-dimensional ones of units, and matrices of experts, whose sizes are multiples of 16. The last
            pattern that matches decides; one that begins with "!" leaves the weight out. The default takes
            all experts.
        remat: the results that a unit's backward pass computes again. "full": all. "attention": all but the
            output of attention. "none": only results that fuse into their readers (element-wise operations,
            row sums, casts, layout changes); results of matmuls and kernels are kept.
        accumulate: micro-batches per optimizer step.
        accumulate_order: "depth" runs each micro-batch through the whole model before the next. "breadth"
            runs all of them through a unit before the next unit (``zerojax.schedule.breadth_first``): weights
            are gathered and gradients reduced once a step, during compute. It keeps the activations of all
            micro-batches for the backward pass, and needs units.
    """

    compute_dtype: ComputeDtype = "bfloat16"
    matmul_dtype: MatmulDtype = "compute"
    fp8: tuple[str, ...] = MATMUL_WEIGHTS
    remat: Remat = "full"
    accumulate: int = field(default=1, metadata={"key": None})  # train.accumulate
    accumulate_order: AccumulateOrder = "depth"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where moments, weights and activations are kept, and in how many bits.

    Attributes:
        moments: the dtype of the optimizer's moments (Adam's two, a momentum): "float32", or "bfloat16" or
            "float8", rounded stochastically, which take half or a quarter of their memory
            (``zerojax.optim.low_precision``).
        host: what is kept in page-locked host memory and copied to the device one layer at a time.
            "optimizer": the master weights and the optimizer's state; the device keeps the weights that
            passes read, 2 bytes a parameter in bfloat16 over all devices. With local updates also the outer
            weights. "weights": the frozen weights, and with "optimizer" the trained weights that passes read.
            "activations": the residuals of a ``Stack``. Results are the same as without.
        host_activations: with "activations" in host, the fraction of each layer's residuals that is there.
            The rest stays on the device, if a host has no room for all.
        update_in_backward: let the backward pass of each ``Stack`` update a layer as soon as its gradients
            are final. Gradients of all layers then never exist at once, and copies of the optimizer's state
            run beside the layers. Needs "optimizer" in host, one backward pass a step, and an optimizer
            without norms of gradients. A step whose loss is a spike or not finite is skipped as always. If a
            gradient is not finite, "skipped" is 1: neither its layer is updated, nor earlier layers of the
            stack, nor parameters outside of stacks. Later layers have been updated by then.
    """

    moments: Moments = "float32"
    host: tuple[HostStore, ...] = ()
    host_activations: float = 1.0
    update_in_backward: bool = False

    def in_host(self, arrays: Stored) -> bool:
        """Whether these arrays are in host memory."""
        return any(arrays in HOST_STORES.get(store, ()) for store in self.host)

    @property
    def updates_by_layers(self) -> bool:
        """Whether the optimizer updates one layer at a time: arrays that it reads are in host memory."""
        return self.in_host("masters") or self.in_host("moments")


@dataclass(frozen=True, kw_only=True)
class LocalUpdates:
    """Local updates: nodes train separate weights and exchange one fragment of them in each step.

    Attributes:
        every: 0, or for local updates the number of steps in which each weight crosses nodes once (DiLoCo,
            Douillard et al., 2023; Streaming DiLoCo, 2025). Every node trains weights that only it has. Each
            step exchanges the nodes' changes of one fragment, 1/``every`` of all elements, and the owners
            apply their mean to the outer weights. Evaluations read the outer weights. ``grads`` (over
            ``node``) is then the format of these changes on their way to the owners. ``weights`` is the
            format of the outer weights' change, on its way back. Each node holds the whole state, spread over
            its devices.
        outer_learning_rate: of the outer weights' SGD with Nesterov momentum.
        outer_momentum: its momentum.
        outer_delay: steps between sending a fragment and using the result. 0 exchanges at the end of each
            step, which waits for the network. 1 sends at the beginning of a step and uses the result at its
            end. With 2 or more, each of the two hops has a whole step to hide behind. What a node learns
            about a fragment in these steps is replaced, so with ``outer_mixing`` 0 they must be fewer than
            ``every``.
        outer_mixing: the fraction of a node's own fragment that stays when it takes up the outer weights; 0
            replaces all of it (Streaming DiLoCo, equation 3).
    """

    every: int = 0
    outer_learning_rate: float = 1.0
    outer_momentum: float = 0.0
    outer_delay: int = 0
    outer_mixing: float = 0.0
