"""The values and combinations that a ``ZeroConfig`` refuses: out of range, impossible, or without effect."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

from pallas_kernels.formats import FORMATS, QUANTIZED, RAW, is_block_size
from zerojax.errors import ConfigurationError
from zerojax.validation.bounds import check_scalars
from zerojax.zero_config.options import HOST_STORES, LocalUpdates

if TYPE_CHECKING:
    from zerojax.zero_config.config import ZeroConfig

_MAX_CHUNKS = 64
_hints = functools.cache(get_type_hints)


def check_zero(zero: "ZeroConfig") -> None:
    """Refuse options that cannot work.

    Raises:
        ConfigurationError: naming the field, its value and the way out.
    """
    check_scalars(zero, "ZeroConfig.{}".format)
    rules = (_values, _formats, _stage, _gradients, _weights, _frozen, _local_updates, _host)
    for fault in chain.from_iterable(rule(zero) for rule in rules):
        raise ConfigurationError(fault)


def _values(z: "ZeroConfig") -> Iterator[str]:
    hints = _hints(type(z))
    for name, hint in hints.items():
        if get_origin(hint) is Literal and (value := getattr(z, name)) not in get_args(hint):
            yield f"ZeroConfig.{name}={value!r} is not one of {get_args(hint)}."
        if hint is int and not isinstance(value := getattr(z, name), Integral):
            yield f"ZeroConfig.{name}={value!r} must be a whole number."
    for name in ("accumulate", "chunks", "sequence_parallel"):
        if getattr(z, name) < 1:
            yield f"ZeroConfig.{name}={getattr(z, name)} must be at least 1."
    if z.chunks > _MAX_CHUNKS:
        yield f"ZeroConfig.chunks={z.chunks} must be at most {_MAX_CHUNKS}."
    if not is_block_size(z.block_size):
        yield f"ZeroConfig.block_size={z.block_size} must be a power of two from 64 to 2048."
    if unknown := [store for store in z.host if store not in HOST_STORES]:
        yield f"ZeroConfig.host has {unknown[0]!r}, which is not one of {tuple(HOST_STORES)}."
    if not 0 < z.host_activations <= 1:
        yield f"ZeroConfig.host_activations={z.host_activations} must be above 0 and at most 1."
    if len(z.grads) != 2:
        yield f"ZeroConfig.grads={z.grads!r} must name two formats: over local, over node."


def _formats(z: "ZeroConfig") -> Iterator[str]:
    local, node = z.grads
    named: list[tuple[str, str | None, Sequence[str]]] = [
        *(("precise", floor, FORMATS) for _, floor in z.precise),
        ("weights", z.weights, FORMATS),
        ("local_weights", z.local_weights, FORMATS),
        ("grads[0] (local)", local, FORMATS),
        ("grads[1] (node)", node, FORMATS),
        ("frozen_weights", z.frozen_weights, (*FORMATS, "nf4")),
    ]
    for name, fmt, allowed in named:
        if fmt is not None and fmt not in allowed:
            yield f"ZeroConfig.{name}: {fmt!r} is not one of {', '.join(allowed)}."


def _stage(z: "ZeroConfig") -> Iterator[str]:
    none = f"stage {z.stage} gathers none: use stage 3"
    if z.stage == 0 and (z.weights or z.local_weights):
        yield "stage 0 gathers no weights: leave weights and local_weights at None."
    if z.state_spread == "node" and z.stage < 3:
        yield f'state_spread="node" is for weights that a node\'s devices share: use stage 3, not {z.stage}.'
    if z.state_spread == "node" and z.every:
        yield (
            f'state_spread="node" has no meaning with local updates (every={z.every}), which keep a whole '
            "state in each node: leave it out."
        )
    if z.experts == "local" and (z.stage == 0 or z.grads_hops == 1):
        setting = "stage=0" if z.stage == 0 else "grads_hops=1"
        yield (
            f'experts="local" leaves each device of a node its own experts, and {setting} makes no '
            'difference between devices of a node: use stage 1 to 3 with grads_hops=2, or experts="gathered".'
        )
    if z.stage == 0 and _quantized(z):
        yield (
            'stage 0 gives every device the whole sum, which has no owner to decode it: use "fp32" or "bf16" '
            "gradients, or stage 1 and above."
        )
    if z.hpz and z.stage < 3:
        yield (
            f"hpz keeps a copy for the backward gather, and stage {z.stage} has no such gather: use stage 3, "
            "or drop hpz."
        )
    if z.accumulate_order == "breadth" and z.stage < 3:
        yield (
            f'accumulate_order="breadth" gathers each unit once for all micro-batches, and {none}, or '
            '"depth".'
        )
    if z.grad_sync == "step" and z.stage < 2:
        yield f'stage {z.stage} always reduces once per step: leave grad_sync at "micro".'
    if z.matmul_dtype == "fp8" and z.stage < 3:
        yield f'matmul_dtype="fp8" multiplies with weights as they are gathered for a unit, and {none}.'
    if z.frozen and z.stage < 3:
        yield (f"frozen weights are spread over a node's devices and gathered for each unit, and {none}.")
    if z.in_host("activations") and z.stage < 3:
        yield (
            'ZeroConfig.host=("activations", ...) moves them layer by layer with the gathers of a Stack, and '
            f"{none}."
        )


def _quantized(z: "ZeroConfig") -> bool:
    """Whether gradients are, on one of their hops."""
    return not set(QUANTIZED).isdisjoint(z.grad_formats)


def _gradients(z: "ZeroConfig") -> Iterator[str]:
    if z.grads_hops == 1 and len(set(z.grad_formats)) > 1:
        yield (
            "ZeroConfig.grads_hops=1 sends gradients once, over both axes together: give the same format "
            f"twice, not grads={z.grads!r}."
        )
    if z.error_feedback and z.grad_sync != "step" and not z.every:
        yield 'error_feedback belongs to the optimizer step, not to a micro-batch: set grad_sync="step".'
    if z.error_feedback and z.grads_hops == 1:
        yield "error_feedback sits on the node hop: it needs grads_hops=2."
    if z.error_feedback and z.grad_formats.node == "fp32":
        yield (
            "error_feedback has nothing to feed back: the node hop is exact fp32. Set another format in "
            "grads, or error_feedback=False."
        )
    if z.grad_sync == "step" and z.grads_hops == 1:
        yield 'grad_sync="step" keeps sums between the two hops: it needs grads_hops=2.'
    if z.rotation and not _quantized(z):
        yield "rotation helps quantized gradients only: set grads, or rotation=0."
    if z.rounding == "stochastic" and not _quantized(z):
        yield 'rounding="stochastic" rounds gradients: set a quantized format in grads.'
    if z.chunks > 1 and z.grads_hops == 1:
        yield (
            "chunks overlap the two gradient hops, and grads_hops=1 has only one: set chunks=1, or "
            "grads_hops=2."
        )


def _weights(z: "ZeroConfig") -> Iterator[str]:
    if z.weights_delta and not z.hpz:
        yield "weights_delta updates the secondary partition: it needs hpz=True."
    if z.weights_delta and z.weight_formats.local not in RAW:
        yield (
            f"weights_delta adds to the secondary partition in place, which "
            f"local_weights={z.local_weights!r} "
            'would round again at every step: use "bf16" or "fp32".'
        )
    if z.delta_resync < 0 or (z.delta_resync and not z.weights_delta):
        yield f"delta_resync={z.delta_resync} must be 0 or more, and needs weights_delta=True."
    if z.matmul_dtype != "fp8" and _is_set(z, "fp8"):
        yield 'ZeroConfig.fp8 names weights of fp8 matmuls: set matmul_dtype="fp8", or leave it out.'
    if z.matmul_dtype == "fp8" and z.local_weights is not None:
        yield (
            f"local_weights={z.local_weights!r} is the format over local of weights that are decoded there: "
            'leave it out with matmul_dtype="fp8", which sends what matmuls read.'
        )


def _frozen(z: "ZeroConfig") -> Iterator[str]:
    name_them = 'name them in frozen, such as frozen=("*",).'
    if z.frozen_weights is not None and not z.frozen:
        yield f"frozen_weights={z.frozen_weights!r} is the format of frozen weights: {name_them}"
    in_world = 'frozen_spread="world" stores frozen weights once in all nodes'
    if z.frozen_spread == "world" and not z.frozen:
        yield f"{in_world}, and none are: {name_them}"
    if z.frozen_spread == "world" and z.hpz:
        yield f"{in_world}, and hpz keeps a copy of gathered weights in each: leave one of the two out."


def _local_updates(z: "ZeroConfig") -> Iterator[str]:
    if not z.every:
        for name in (field.name for field in fields(LocalUpdates)):
            if _is_set(z, name):
                yield (
                    f"ZeroConfig.{name} belongs to local updates: set every, such as every=64, or leave "
                    "it out."
                )
        return
    bounds = {
        "every": (z.every > 0, "at least 1, or 0 for none"),
        "outer_learning_rate": (z.outer_learning_rate > 0, "positive"),
        "outer_momentum": (0 <= z.outer_momentum < 1, "from 0 to less than 1"),
        "outer_delay": (0 <= z.outer_delay <= z.every, f"from 0 to every={z.every}"),
        "outer_mixing": (0 <= z.outer_mixing < 1, "from 0 to less than 1"),
    }
    for name, (holds, bound) in bounds.items():
        if not holds:
            yield f"ZeroConfig.{name}={getattr(z, name)} must be {bound}."
    if z.outer_delay == z.every and not z.outer_mixing:
        yield (
            f"ZeroConfig.outer_delay={z.outer_delay} with every={z.every} trains nothing: nodes take up a "
            "fragment of the outer weights just before they send it again, and what they have learnt in the "
            "meantime is replaced. Set a larger every, a smaller outer_delay, or outer_mixing above 0."
        )
    if z.stage == 0:
        yield "every is for weights that a node's devices share: use stage 1, 2 or 3."
    without = {
        "hpz": "within a node there is no other copy to keep",
        "weights_delta": "nodes have weights of their own",
        "grad_sync": "gradients do not cross nodes",
        "grads_hops": "gradients stay within a node",
        "frozen_spread": "a node then needs other nodes' weights in every pass",
    }
    for name, why in without.items():
        if _is_set(z, name):
            yield (
                f"ZeroConfig.{name}={getattr(z, name)!r} has no meaning with local updates (every={z.every}"
                f"): {why}. Leave it out" + (f', or the preset "{z.base}".' if z.base != "zero3" else ".")
            )


def _is_set(z: "ZeroConfig", name: str) -> bool:
    return getattr(z, name) != getattr(type(z), name)


def _host(z: "ZeroConfig") -> Iterator[str]:
    if z.host_activations < 1 and not z.in_host("activations"):
        yield (
            f"ZeroConfig.host_activations={z.host_activations} needs activations in host memory: set "
            'host=("activations",), or leave it out.'
        )
    if z.updates_by_layers and (z.stage == 0 or z.delta_resync):
        setting = "stage=0" if z.stage == 0 else "delta_resync"
        yield (
            f'ZeroConfig.host=("optimizer", ...) does not go with {setting}: use stages 1 to 3, without '
            "resyncs."
        )
    if z.in_host("masters") and z.every and (z.matmul_dtype == "fp8" or z.weight_formats.local not in RAW):
        setting = 'matmul_dtype="fp8"' if z.matmul_dtype == "fp8" else f"local_weights={z.local_weights!r}"
        yield (
            f'ZeroConfig.host=("optimizer", ...) with local updates (every={z.every}) encodes one fragment '
            f"of the weights, and {setting} encodes whole layers: leave it out, or keep the optimizer "
            "on the device."
        )
    if z.update_in_backward:
        needs = {
            f'host=("optimizer", ...), not {z.host}': z.in_host("masters"),
            f"stage 3, whose units reduce gradients in the backward pass, not stage {z.stage}": z.stage == 3,
            f'one backward pass a step, not {z.passes}: accumulate_order="breadth"': z.passes == 1,
            f"an update that waits for no fragment: no local updates (every={z.every})": not z.every,
            "gradients that are final in the backward pass: error_feedback=False": not z.error_feedback,
        }
        for what, there in needs.items():
            if not there:
                yield (f"ZeroConfig.update_in_backward needs {what}. Or leave update_in_backward out.")
