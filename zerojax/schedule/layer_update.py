"""Updates the layers of a stack in its backward pass, each as soon as its gradient sums have arrived.

The sinks of such a stack carry everything that an update changes, stacked: master weights and moments in host
memory, and the encoded weights. Their "cotangents" are the same arrays after the update. So gradients of all
layers never exist at once, and copies from and to host memory run beside the layers' compute.

XLA cannot read and write the same stack in host memory at once. Computing a layer takes about as long as
copying one layer in and one out. So beside one layer half of the stacks are read and the other half written,
two layers each; beside the next layer the halves change places. At most three layers of each stack are on the
device.

An update needs facts about the whole step, such as the number of tokens, which are known only after the
forward pass. They reach the backward pass as the cotangent of a ``probe`` that the forward pass returns
(``with_facts``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Num, PyTree

from zerojax.errors import ConfigurationError
from zerojax.schedule.sum_storage import Stored
from zerojax.sharding.layers import Index, layer_at, put_layer
from zerojax.sharding.layout import Values
from zerojax.weights import Payloads, Weights

MASTER = ""
"""The key of the master weight in ``LayerState.held``."""
_Key = tuple[int, str]
"""Key of a master weight or moment:

The number of the weight in its unit, and the key in ``LayerState.held``.
"""
_Held = dict[_Key, Array]
_BYTES = (jnp.uint8, jnp.int8)
_BYTE = jnp.float8_e4m3fn
"""Stands in for bytes, which have no cotangents."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerState:
    """The sink of one weight of a stack; and its cotangent, the same arrays after the update.

    Outside of the backward pass also the same arrays in their own dtypes, or their PartitionSpecs.

    Attributes:
        held: fp32 master weight and moments ``[layers, n, 1, ...]``, in host memory.
        encoded: ``[layers, m]``, the weight as its owner sends it next, with bytes as 8-bit floats.
        scale: fp32 ``[layers]``, for a weight of fp8 products; otherwise None.
        squares: an fp32 zero. In one weight of the stack its cotangent is the sum of squares of the stack's
            mean gradients, over all devices.
    """

    held: dict[str, Array]
    encoded: Num[Array, "layers m"]
    scale: Float32[Array, " layers"] | None
    squares: Float32[Array, ""]


class Facts(NamedTuple):
    """Facts about the whole step that an update needs.

    Attributes:
        tokens: the number of tokens, by which gradient sums are divided.
        taken: 0 if the step is skipped because of its loss, otherwise 1.
    """

    tokens: Float32[Array, ""]
    taken: Float32[Array, ""]


UpdateLayer = Callable[
    [Values, Sequence[dict[str, Array]], Weights, PyTree[Array], Facts, Array], list[LayerState]
]
"""Computes a layer's update. The arguments are its gradient sums, its masters and moments, its weights after
the forward pass, the optimizer's other state, the facts and the sum of squares so far. The results have no
axis of layers. Bytes of encoded weights stay bytes, and all results have the sum of squares up to this layer.
"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerUpdate:
    """How a stack's layers are updated.

    Attributes:
        counters: the optimizer's state without the moments.
        limit: the largest loss that is not a spike.
        run: the update of a layer.
    """

    counters: PyTree[Array]
    limit: Float32[Array, ""]
    run: UpdateLayer = field(metadata={"static": True})

    def facts(self, loss: Float32[Array, ""], tokens: Float32[Array, ""]) -> Facts:
        """The facts of a step that updates need, from its mean loss and number of tokens."""
        taken = jnp.isfinite(loss) & ~(loss > self.limit)
        return Facts(tokens, taken.astype(jnp.float32))


def has_cotangent(dtype: jnp.dtype) -> bool:
    """Whether an array of the dtype can be in a sink after ``as_floats``."""
    return jnp.issubdtype(dtype, jnp.floating) or dtype in _BYTES


def as_floats(x: Num[Array, "..."]) -> Float[Array, "..."]:
    """An array that can have a cotangent: bytes become 8-bit floats, other dtypes stay."""
    return lax.bitcast_convert_type(x, _BYTE) if x.dtype in _BYTES else x


def as_encoded(x: Float[Array, "..."], dtype: jnp.dtype) -> Num[Array, "..."]:
    """Undo ``as_floats`` for an array whose dtype was ``dtype``."""
    return lax.bitcast_convert_type(x, dtype) if dtype in _BYTES else x


def probe() -> Float32[Array, " facts"]:
    """The array that the forward pass returns for ``with_facts``."""
    return jnp.zeros(len(Facts._fields), jnp.float32)


@jax.custom_vjp
def with_facts(
    loss: Float32[Array, ""], probes: Sequence[Float32[Array, " facts"]], facts: Facts
) -> Float32[Array, ""]:
    """Returns ``loss`` unchanged, but gives the ``facts`` to the ``probes`` as their cotangents."""
    del probes, facts
    return loss


def _with_facts_fwd(
    loss: Array, probes: Sequence[Array], facts: Facts
) -> tuple[Array, tuple[Sequence[Array], Facts]]:
    return loss, (probes, facts)


def _with_facts_bwd(
    residuals: tuple[Sequence[Array], Facts], cotangent: Array
) -> tuple[Array, Sequence[Array], None]:
    probes, facts = residuals
    return cotangent, jax.tree.map(lambda _: jnp.stack(facts), probes), None


with_facts.defvjp(_with_facts_fwd, _with_facts_bwd)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Carried:
    """Carried through the backward pass.

    Attributes:
        held: the stacks.
        here: their layers on the device; the next one to be updated comes first.
        pending: updated layers that are yet to be stored, in order.
        encoded, scales: stacked, for each weight.
        squares: the sum of squares so far.
        reads: whether the stacks in ``UpdatedLayers._first`` are read beside the next layer.
    """

    held: _Held
    here: dict[_Key, list[Array]]
    pending: dict[_Key, list[Array]]
    encoded: Payloads
    scales: tuple[Array | None, ...]
    squares: Array
    reads: bool = field(metadata={"static": True})


class UpdatedLayers:
    """The ``SumStorage`` of a stack whose layers are updated in the backward pass, by sums as they arrive."""

    def __init__(
        self,
        sinks: Sequence[LayerState],
        weights: Weights,
        update: LayerUpdate,
        facts: Float32[Array, " facts"],
        zero: Index,
    ) -> None:
        """Take the arrays with which a backward pass begins.

        ``weights`` have all layers, as the forward pass has left them. ``facts`` are the probe's cotangent,
        and ``zero`` comes from ``by_dma``.
        """
        self._sinks, self._weights, self._update, self._zero = sinks, weights, update, zero
        self._facts = Facts(*facts)
        self._last = sinks[0].encoded.shape[0] - 1
        self._first = _read_first(_flat(sinks))

    def start(self, residuals: PyTree[Array]) -> Stored:
        """Like ``SumStorage.start``. Fetches the last layer, and for half of the stacks the one before."""
        held = _flat(self._sinks)
        here = {
            key: [
                layer_at(x, self._copied(layer))
                for layer in (self._last, self._last - 1)[: 1 + (key in self._first)]
                if layer >= 0
            ]
            for key, x in held.items()
        }
        here, held = lax.optimization_barrier((here, held))
        encoded = _encoded(self._sinks, self._weights)
        scales = tuple(sink.scale for sink in self._sinks)
        pending: dict[_Key, list[Array]] = {key: [] for key in held}
        carried = _Carried(held, here, pending, encoded, scales, jnp.float32(0), reads=False)
        return Stored(residuals, carried)

    def weights(self, stored: Stored, weights: Weights) -> Weights:
        """The weights that are gathered. Encoded ones are read from the arrays to which updates write."""
        return _read_from(stored.extra.encoded, weights)

    def update(self, stored: Stored, sums: Values, layer: Index) -> list[LayerState]:
        """Update the layer that was fetched last."""
        carried: _Carried = stored.extra
        sums = _of_all(sums)
        here = [{key: carried.here[k, key][0] for key in sink.held} for k, sink in enumerate(self._sinks)]
        weights = layer_at(self._weights[: len(here)], layer)
        return self._update.run(sums, here, weights, self._update.counters, self._facts, carried.squares)

    def put(self, stored: Stored, new: list[LayerState], layer: Index) -> Stored:
        """After the update of a layer, store or fetch the layers that are due beside it."""
        carried: _Carried = stored.extra
        if isinstance(layer, int) and layer == 0:
            return stored._replace(extra=self._finished(carried, new))
        held, here, pending = dict(carried.held), {}, {}
        for key, x in _flat(new).items():
            rest, updated = carried.here[key][1:], [*carried.pending[key], x]
            if (key in self._first) == carried.reads:
                ahead = [at for at in (layer - 1, layer - 2) if not isinstance(at, int) or at >= 0]
                # Without the barrier the compiler would copy the whole stack, to read it while it is written.
                fetched = [layer_at(held[key], self._copied(at)) for at in ahead]
                fetched, held[key] = lax.optimization_barrier((fetched, held[key]))
                here[key], pending[key] = [*rest, *fetched], updated
            else:
                held[key] = _put_last(held[key], updated, self._copied(layer))
                here[key], pending[key] = rest, []
        sent = self._sent(carried, new, layer)
        now = replace(sent, held=held, here=here, pending=pending, reads=not carried.reads)
        return stored._replace(extra=now)

    def after[T: PyTree[Array]](
        self, stored: Stored, new: list[LayerState], values: T
    ) -> tuple[Stored, list[LayerState], T]:
        """Returns its arguments unchanged. ``values`` wait for the update, and copies wait for ``values``."""
        carried: _Carried = stored.extra
        new, held, values = lax.optimization_barrier((new, carried.held, values))
        return stored._replace(extra=replace(carried, held=held)), new, values

    def write(self, stored: Stored, sums: Values, layer: Index) -> Stored:
        """As ``SumStorage.write``."""
        return self.put(stored, self.update(stored, sums, layer), layer)

    def collect(self, stored: Stored, first: Values | None) -> tuple[LayerState, ...]:
        """Update layer 0 by its sums, ``[n]``, if it is not updated yet; returns the sinks' cotangents."""
        carried: _Carried = (stored if first is None else self.write(stored, first, 0)).extra
        return tuple(
            LayerState(
                {key: carried.held[k, key] for key in sink.held},
                as_floats(carried.encoded[k]),
                carried.scales[k],
                carried.squares if k == 0 else jnp.zeros_like(carried.squares),
            )
            for k, sink in enumerate(self._sinks)
        )

    def _finished(self, carried: _Carried, new: list[LayerState]) -> _Carried:
        """The carry at the end: layer 0 is updated, and all pending layers are stored."""
        held = {
            key: _put_last(carried.held[key], [*carried.pending[key], x], self._zero)
            for key, x in _flat(new).items()
        }
        return replace(self._sent(carried, new, 0), held=held)

    def _copied(self, layer: Index) -> Index:
        """The index of a layer in a form for which copies from or to host memory are made by DMA."""
        return layer + self._zero if isinstance(layer, int) else layer

    def _sent(self, carried: _Carried, new: list[LayerState], layer: Index) -> _Carried:
        encoded = put_layer(carried.encoded, tuple(own.encoded for own in new), layer)
        scales = put_layer(carried.scales, tuple(own.scale for own in new), layer)
        return replace(carried, encoded=encoded, scales=scales, squares=new[0].squares)


@jax.custom_batching.custom_vmap
def _of_all(sums: Values) -> Values:
    """Returns the gradient sums unchanged. Refuses to run under ``vmap``."""
    return sums


@_of_all.def_vmap
def _refuse_mapped(size: int, mapped: list[bool], sums: Values) -> tuple[Values, list[bool]]:
    del size, mapped, sums
    raise ConfigurationError(
        "the loss maps a Stack over inputs (nnx.vmap), so a layer has several gradients in its backward "
        "pass: give the Stack one array of all inputs, or set update_in_backward=False."
    )


def weights_of(sinks: Sequence[LayerState], weights: Weights) -> Weights:
    """All weights. The encoded ones are read from their sinks."""
    return _read_from(_encoded(sinks, weights), weights)


def _encoded(sinks: Sequence[LayerState], weights: Weights) -> Payloads:
    trained = zip(sinks, weights, strict=False)
    return tuple(as_encoded(sink.encoded, w.layout.next_codec.dtype) for sink, w in trained)


def _read_from(encoded: Payloads, weights: Weights) -> Weights:
    read = [w.replace(x) if w.is_encoded else w for w, x in zip(weights, encoded, strict=False)]
    return (*read, *weights[len(read) :])


def _put_last(stack: Array, layers: Sequence[Array], last: Index) -> Array:
    """A stack with layers replaced.

    ``last`` is the index of the last one; each one before has a larger index.
    """
    # In one copy: of two, the second would wait for the first, and so would the layer's computing.
    return put_layer(stack, jnp.stack(layers[::-1]), last)


def _flat(states: Sequence[LayerState]) -> _Held:
    return {(k, key): x for k, state in enumerate(states) for key, x in state.held.items()}


def _read_first(held: _Held) -> set[_Key]:
    """The stacks that are read while the others are written: about half of the bytes."""
    chosen: set[_Key] = set()
    balance = 0
    for key, x in sorted(held.items(), key=lambda item: -item[1].nbytes):
        if balance <= 0:
            chosen.add(key)
            balance += x.nbytes
        else:
            balance -= x.nbytes
    return chosen
