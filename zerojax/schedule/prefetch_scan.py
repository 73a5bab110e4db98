"""The prefetching scan runs a stack of units. It gathers ahead of the computing layer and reduces behind it.

One ``custom_vjp`` covers the whole scan, because XLA moves no collective from one iteration of a loop to
another. In program order:

- forward, layer i: the ``WeightPrefetcher`` moves layers i + 1 to i + 3 one stage on, then layer i computes.
- The last layer's weights are kept, and the backward pass begins with them.
- backward, layer i: the ``WeightPrefetcher`` moves layers i - 1 to i - 3 one stage on and the
  ``GradientQueue`` layers i + 1 to i + 3. Then layer i's vjp computes and its gradients are encoded.

Within an iteration none of these depends on another, so the scheduler can run them side by side. A payload
that crosses nodes is ready when the iteration begins: between two crossings lies only the end of the loop.
The forward loop carries one layer's weights, one layer's payload and one layer's arrivals. The backward loop
also carries what each hop of the gradients sends and receives. A pass that does not cross nodes gathers
weights one layer ahead and sums gradients one layer behind. Layers with nothing left to fetch, or nothing
yet to send, are peeled off the loops.

The layers may be of several kinds (``zerojax.sharding.layers``). A loop then runs a period of layers in each
iteration. Weights, state, residuals and sums are tuples with the stacked values of each kind.

With ``ShardingStrategy.residuals_in_host`` a fraction of the residuals is in host memory. Layer i's are
copied there while layer i computes, as soon as they exist, and come back while the backward pass computes
layer i + 1.

If the loss itself contains a gradient, this schedule must be differentiated. Derivatives of any order are
taken through the same layers run one after another (``_one_by_one``), without overlap of hops and compute.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, PyTree

from zerojax.errors import ConfigurationError
from zerojax.schedule.breadth_first import (
    Flags,
    all_batched,
    broadcast_unbatched,
    map_microbatches,
    with_batching_rule,
)
from zerojax.schedule.layer_update import probe
from zerojax.schedule.scan_backward import Kept, ScanArgs, run_backward
from zerojax.schedule.transforms import Pullback, floats, pullback, with_float0
from zerojax.schedule.unit import (
    CALLED,
    READ_BY_UNIT,
    Arrays,
    Body,
    Sharded,
    call_gathered,
    on_operands,
    refuse_mapped,
    take_apart,
)
from zerojax.sharding.layers import Order, Place, cut_large, empty_layers, over_layers, pieces_away
from zerojax.sharding.layout import Values
from zerojax.sharding.memory import in_host, to_host
from zerojax.weights import Fetching, WeightPrefetcher, Weights, to_full, to_secondary


class _Results(NamedTuple):
    """The results of the scan.

    Attributes:
        x: the last layer's activations.
        state: for each kind, the layers' new state, stacked.
        refreshed: for each kind, the trained weights at "secondary", stacked, if the scan refreshed delta's
            replicas; otherwise empty.
        probes: for each kind, a probe for ``with_facts``, if the backward pass updates the layers; otherwise
            empty.
    """

    x: Arrays
    state: tuple[Arrays, ...]
    refreshed: tuple[Weights, ...]
    probes: tuple[list[Array], ...]


class Scanned(NamedTuple):
    """Layers of one kind.

    Attributes:
        body: ``x, state[i] = body(weights[i], state[i], x, shared)`` runs layer i. It is a pure function of
            one layer's whole weights, and closes over nothing that is traced.
        weights: stacked ``Sharded``s; where blocks run without ``scan_units``, arrays or operands.
        state: stacked.
    """

    body: Callable[[Sequence[Array], Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    weights: Sequence[Any]
    state: Arrays


def scan_units(
    order: Order, kinds: Sequence[Scanned], x: Arrays, shared: Arrays
) -> tuple[Arrays, list[tuple[list[Sharded] | None, Arrays]]]:
    """Run the layers in their order.

    ``x`` are floating-point activations, whose shapes and dtypes every layer keeps. Every layer receives
    ``shared``.

    Returns:
        The last layer's ``x``; and for each kind its weights, if the scan changed them, and its state.
    """
    weights = (checkpoint_name(list(kind.weights), READ_BY_UNIT) for kind in kinds)
    units, seeds = zip(*map(take_apart, weights), strict=True)
    bodies = tuple(on_operands(kind.body, kind.weights) for kind in kinds)
    for unit in units:
        if unit.update is not None:
            first, *others = jax.tree.leaves(x)
            first = checkpoint_name(first, CALLED + unit.weights[0].layout.name)
            x = jax.tree.unflatten(jax.tree.structure(x), [first, *others])

    def in_breadth(size: int, mapped: tuple[ScanArgs], args: ScanArgs) -> tuple[_Results, Flags]:
        """Run all micro-batches through a layer before the next layer; ``state`` has their axis, too."""
        (given,) = mapped
        refuse_mapped(given.units)
        x, state = broadcast_unbatched(size, (given.x, given.state), (args.x, args.state))
        state = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state)
        turns = tuple(
            map_microbatches(body, (all_batched(own, True), all_batched(x, True), given.shared))
            for body, own in zip(bodies, state, strict=True)
        )
        out = cast(_Results, _scan(_Layers(order, turns), args._replace(x=x, state=state)))
        x, state, refreshed, probes = out
        state = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), state)
        flags = _Results(*all_batched((x, state), True), *all_batched((refreshed, probes), False))
        return _Results(x, state, refreshed, probes), flags

    run = with_batching_rule(in_breadth, functools.partial(_scan, _Layers(order, bodies)))
    states = tuple((own, kind.state) for own, kind in zip(seeds, kinds, strict=True))
    x, states, refreshed, probes = run(ScanArgs(units, x, states, shared))
    left = [_changed(kind.weights, *own) for kind, *own in zip(kinds, refreshed, probes, strict=True)]
    return x, list(zip(left, states, strict=True))


def _changed(weights: Sequence[Sharded], refreshed: Weights, probe: list[Array]) -> list[Sharded] | None:
    """The weights of a kind with refreshed replicas, and the probe in the first one; None without either."""
    if not (refreshed or probe):
        return None
    replicas = {w.layout.path: w for w in refreshed}
    first, *others = (weight.updated(replicas) for weight in weights)
    return [replace(first, probe=probe[0]) if probe else first, *others]


@dataclass(frozen=True, eq=False)
class _Layers:
    """The order of a stack's layers, and the body of each kind."""

    order: Order
    bodies: tuple[Body, ...]


_Ran = tuple[Arrays, Arrays, Pullback | None]


def _run(
    body: Body, whole: Weights, state: Arrays, x: Arrays, shared: Arrays, *, keeping: bool, share: float
) -> _Ran:
    """Run a layer; returns its ``x`` and state, and a residual: the body's vjp if ``keeping``, or None.

    Arrays that all layers share, or that are gathered again, are taken out of the residual. A fraction
    ``share`` of it is cut off, for host memory.
    """
    if not keeping:
        return *body(whole, state, x, shared), None
    (x, after), vjp = pullback(body, whole, state, x, shared)
    _, own_state, own_x, _ = vjp.args_res
    residual = vjp.replace(args_res=[None, own_state, own_x, None])
    return x, after, cut_large(residual, share) if share else residual


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(layers: _Layers, args: ScanArgs) -> _Results:
    return _forward(layers, args, keeping=False)[0]


def _one_by_one(layers: _Layers, args: ScanArgs) -> tuple[Arrays, tuple[Arrays, ...]]:
    """The scan's activations and state, with one gather per layer and no overlap: only for derivatives."""
    if any(unit.update is not None for unit in args.units):
        raise ConfigurationError(
            "the loss contains a gradient, which is differentiated through a Stack, and its layers are "
            "updated in their backward pass: set update_in_backward=False."
        )
    # Gradients go to the sinks, and kernels that encode have none.
    units = (replace(unit, weights=lax.stop_gradient(unit.weights)) for unit in args.units)
    stacks = tuple(zip(units, args.state, strict=True))

    def one(kind: int, x: Arrays, own: Arrays) -> tuple[Arrays, Arrays]:
        unit, state = own
        return call_gathered(layers.bodies[kind], unit, (state, x, args.shared))

    order, x = layers.order, args.x
    if order.uniform:
        x, state = lax.scan(functools.partial(one, 0), x, stacks[0])
        return x, (state,)
    after: list[list[Arrays]] = [[] for _ in stacks]
    for number, kind in enumerate(order.kinds):
        x, state = one(kind, x, Place(order, number).of(stacks))
        after[kind].append(state)
    return x, tuple(jax.tree.map(lambda *each: jnp.stack(each), *own) for own in after)


class _ForwardCarry(NamedTuple):
    """Carried from one layer of the forward pass to the next.

    Attributes:
        x: activations.
        fetching: the weights of later layers.
        kept: this layer's secondary partitions that the backward pass gathers from. The ones that it finds
            among the scan's arguments or the replicas are left out.
        whole: this layer's weights.
        stacks: for each kind, new state, residuals and ``kept`` of the earlier layers, stacked.
    """

    x: Arrays
    fetching: Fetching
    kept: Weights
    whole: Weights
    stacks: tuple[tuple[Arrays, Pullback | None, Weights], ...]


def _forward(layers: _Layers, args: ScanArgs, *, keeping: bool) -> tuple[_Results, Kept]:
    """Run every layer in order, gathering each while those before it compute."""
    units, x, state, shared = args
    weights = tuple(unit.weights for unit in units)
    strategy, order, last = units[0].strategy, layers.order, layers.order.last
    share = strategy.residuals_in_host
    # Each kind is traced once for all layers.
    runs = [
        jax.jit(functools.partial(_run, body, keeping=keeping, share=share), inline=True)
        for body in layers.bodies
    ]
    prefetcher = WeightPrefetcher(weights, step=1, separate_stream=strategy.separate_stream)
    looped = max(last - 1, 0) if prefetcher.crosses else last

    def kept_of(secondary: Weights, kind: int) -> Weights:
        each = zip(weights[kind], secondary, strict=True)
        return tuple(
            gathered for own, gathered in each if own.replica is None and not own.reaches(strategy.keep)
        )

    def layer(carry: _ForwardCarry, place: Place) -> _ForwardCarry:
        kind, after = place.kind, (place + 1).kind
        fetching, secondary = prefetcher.advance(carry.fetching, place)
        if place.peeled and any(w.layout.frozen for w in weights[after]):
            # Frozen weights depend on nothing in the loop. Without the barrier they would be gathered early.
            secondary, x = lax.optimization_barrier((secondary, carry.x))
            carry = carry._replace(x=x)
        whole = to_full(secondary)
        x, new, residual = runs[kind](carry.whole, place.of(state), carry.x, shared)
        stacks = place.put(carry.stacks, (new, residual, carry.kept))
        return _ForwardCarry(x, fetching, kept_of(secondary, after), whole, stacks)

    def empty(place: Place, secondary: Weights, whole: Weights) -> tuple[Arrays, Pullback | None, Weights]:
        # Filled in place by hand: lax.scan would stack the results of its iterations, but not of peeled ones.
        kind, count = place.kind, order.counts[place.kind]
        rows = count - order.uniform
        _, new, residual = jax.eval_shape(runs[kind], whole, place.of(state), x, shared)
        on_host = pieces_away(residual) if share else ()
        residuals = empty_layers(residual, rows, on_host)
        return empty_layers(new, count), residuals, empty_layers(kept_of(secondary, kind), rows)

    first = Place(order, 0)
    fetching, secondary = prefetcher.start(first)
    whole = to_full(secondary)
    stacks = [empty(first, secondary, whole)]
    for kind in range(1, len(units)):
        place = Place(order, order.kinds.index(kind))
        stacks.append(empty(place, *jax.eval_shape(_gathered, place.of(weights))))
    carry = _ForwardCarry(x, fetching, kept_of(secondary, 0), whole, tuple(stacks))
    carry = over_layers(layer, carry, order, range(last), range(order.first_periodic, looped), order.period)
    place = Place(order, last)
    x, new, residual = runs[place.kind](carry.whole, place.of(state), carry.x, shared)
    states, residuals, kept = zip(*carry.stacks, strict=True)
    states = place.put(states, new)
    fresh = carry.fetching.replicas  # of the trained weights that cross nodes, which come first
    refreshed = tuple(
        tuple(w.replace(copy, "secondary") for w, copy in zip(own, new, strict=False))
        for own, new in zip(weights, fresh, strict=True)
    )
    probes = tuple([] if unit.update is None else [probe()] for unit in units)
    return _Results(x, states, refreshed, probes), Kept(order, residuals, kept, residual, carry.whole)


def _gathered(weights: Weights) -> tuple[Weights, Weights]:
    """A layer's secondary partitions and whole weights."""
    secondary = to_secondary(weights)
    return secondary, to_full(secondary)


def _scan_fwd(layers: _Layers, args: ScanArgs) -> tuple[_Results, tuple[ScanArgs, Kept]]:
    def plain(result: tuple[_Results, Kept], args: ScanArgs) -> tuple[_Results, Kept]:
        results, kept = result
        x, state = _one_by_one(layers, _after_update(args, results.refreshed))
        return results._replace(x=x, state=state), kept

    results, kept = _with_derivatives_of(plain, functools.partial(_forward, layers, keeping=True))(args)
    return results, (_after_update(args, results.refreshed), kept)


def _with_derivatives_of[T: PyTree[Array]](
    plain: Callable[..., T], function: Callable[..., T]
) -> Callable[..., T]:
    """``function`` with the derivatives of ``plain(result, *args)``, which has the same results."""

    @jax.custom_vjp
    def run(*args: PyTree[Array]) -> T:
        return function(*args)

    def forward(*args: PyTree[Array]) -> tuple[T, tuple[tuple[PyTree[Array], ...], T]]:
        result = run(*args)  # not `function`: it may be differentiated again
        return result, (args, result)

    def backward(residuals: tuple[tuple[PyTree[Array], ...], T], cotangents: T) -> tuple[PyTree[Array], ...]:
        args, result = residuals
        found = jax.vjp(functools.partial(plain, result), *args)[1](cotangents)
        # JAX's zeros for what `plain` does not read are on the device.
        return jax.tree.map(lambda x, arg: to_host(x) if in_host(arg) else x, found, args)

    run.defvjp(forward, backward)
    return run


def _after_update(args: ScanArgs, refreshed: tuple[Weights, ...]) -> ScanArgs:
    """The arguments of a scan over the weights as the forward pass has left them."""
    units = tuple(
        replace(unit, weights=(*new, *unit.weights[len(new) :]))
        for unit, new in zip(args.units, refreshed, strict=True)
    )
    return args._replace(units=units)


def _scan_bwd(layers: _Layers, residuals: tuple[ScanArgs, Kept], cotangents: _Results) -> tuple[ScanArgs]:
    args, kept = residuals
    given = (cotangents.x, cotangents.state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)

    def plain(
        result: Arrays, kept: Kept, given: list[Array], args: ScanArgs, facts: tuple[list[Array], ...]
    ) -> Arrays:
        del result, kept, facts

        def run(sinks: tuple[Values, ...], x: Arrays, state: Arrays, shared: Arrays) -> tuple[Arrays, Arrays]:
            each = zip(args.units, sinks, strict=True)
            units = tuple(replace(unit, sinks=own) for unit, own in each)
            return _one_by_one(layers, ScanArgs(units, x, state, shared))

        sinks = tuple(unit.sinks for unit in args.units)
        _, vjp = pullback(run, sinks, args.x, args.state, args.shared)
        sums, of_x, of_state, of_shared = vjp(with_float0(given, shapes))
        return sums, of_x, tuple(map(floats, of_state)), floats(of_shared)

    function = functools.partial(run_backward, shapes)
    sums, of_x, of_state, of_shared = _with_derivatives_of(plain, function)(
        kept, floats(given), args, cotangents.probes
    )
    of_units = tuple(unit.cotangent(own) for unit, own in zip(args.units, sums, strict=True))
    of_state = tuple(map(with_float0, of_state, args.state))
    return (ScanArgs(of_units, of_x, of_state, with_float0(of_shared, args.shared)),)


_scan.defvjp(_scan_fwd, _scan_bwd)
