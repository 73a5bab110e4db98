"""The step: one compiled function from a state and a batch to the next state and its metrics.

The backward pass and every hop run inside ``shard_map``; the optimizer runs on the global arrays, where a
norm over the whole tree is right by construction.
"""

import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from zerojax.adapters.loss import LossFn
from zerojax.comm.in_order import one_at_a_time
from zerojax.comm.xla_options import CompilerOptions, compiler_options
from zerojax.errors import ConfigurationError
from zerojax.log import warn
from zerojax.matmul.fp8 import has_fp8
from zerojax.sharding.mesh import BY_ROWS
from zerojax.train import passes
from zerojax.train.batch import Batch, abstract_batch, batch_specs, place, places_arguments, rows_once
from zerojax.train.exchange import REPLICATED, Exchange, Metrics
from zerojax.train.fields import Shards, abstract_fields, on_devices, shardings_of
from zerojax.train.local_updates import FragmentExchange, reported, scalars_of
from zerojax.train.spec import TrainSpec, with_spec, without_spec
from zerojax.train.state import TrainState, check_there, settled

_Read = dict[str, PyTree[Array]]
"""Fields of a state that a step reads and does not change, by name."""
_SCALARS = "scalars of the loss function's aux"
"""Under this name a spec remembers ``scalars_of`` its steps."""


@places_arguments()
def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """Take one optimizer step.

    A step whose loss or gradient is not finite is skipped. So is a step whose loss is a spike, if the state
    has a ``SpikeRule``. A skipped step changes only the counters and delta's replicas, which take up the last
    change of the weights before the loss is known.

    The state is donated: the next one takes over its memory. Write ``state, metrics = train_step(state,
    batch)`` and do not use the old state, or a part of it, again. Copies stay valid: the results of
    ``gather_params`` and ``gather_model``, metrics, and a checkpoint that is still being saved. References
    do not: ``state.params``, and states made by ``state.replace``, ``put_params`` and ``averaged``. The batch
    is not donated.

    Args:
        state: the state so far; its arrays are invalid afterwards.
        batch: a pytree of arrays whose leading axis is the global batch, a multiple of the number of
            devices times ``ZeroConfig.accumulate``; in several processes, this process's part of it.
            Scalars (arrays without axes, or Python's numbers), such as a schedule's weight, and
            ``zerojax.Replicated`` arrays go unchanged to every device and micro-batch; all processes pass the
            same ones.

    Returns:
        The next state, and the metrics as scalar arrays that GPUs are still computing: "loss" and the loss
        function's aux (means over all tokens), "grad_norm", "skipped" (0 or 1), "skipped_in_row"; with a
        ``SpikeRule`` also "spike" (0 or 1) and "loss_limit", the largest loss that is not a spike.

        With local updates (``ZeroConfig.every``) and an ``outer_delay`` they are the metrics of the step
        before, and NaN or 0 at the first step. Nodes report with the next exchange, so that no step waits
        for another node. ``last_metrics`` returns the metrics of the last step. "skipped" and
        "skipped_in_row" are then the largest of all nodes, and "grad_norm" is the root mean square of theirs.

    Raises:
        ConfigurationError: the batch does not divide, its arrays have unequal leading axes or hold no
            numbers, or the state was donated before or has no optimizer.

    Examples:
        >>> batch = {"x": np.ones((8, 8), np.float32), "y": np.zeros((8, 8), np.float32)}
        >>> state, metrics = zerojax.train_step(state, batch)
        >>> int(state.step), int(metrics["skipped"])
        (1, 0)
    """
    spec = state.spec
    placed = place(spec, batch, spec.zero.accumulate)
    check_there(state)
    state = settled(state)
    following, metrics = one_at_a_time(spec.mesh, _compiled_step(spec)(*_without_read_fields(state), placed))
    spec.once(_SCALARS, lambda: scalars_of(metrics))
    return dataclasses.replace(following, spec=spec, frozen=state.frozen), metrics


def last_metrics(state: TrainState) -> Metrics:
    """The metrics of the last step of a state with local updates, which ``train_step`` may return a step
    late.

    It waits for all nodes, and all processes must call it: at the end of a run, or before an evaluation or a
    checkpoint.

    Returns:
        The metrics that ``train_step`` returns. The loss function's aux is left out if this process has taken
        no step.

    Raises:
        ConfigurationError: the state has no local updates, or was donated.
    """
    check_there(state)
    if state.local is None:
        raise ConfigurationError(
            "the state has no local updates (ZeroConfig.every): train_step has returned the metrics of its "
            "last step."
        )
    return reported(state.spec, state.local, state.spec.cache.get(_SCALARS, ()))


def reports_later(state: TrainState) -> bool:
    """Whether ``train_step`` returns the previous step's metrics."""
    return state.local is not None and state.spec.zero.outer_delay > 0


def skipped_in_row(state: TrainState) -> int:
    """The number of consecutive skipped steps up to the last one; the largest of all nodes."""
    if state.local is None:
        return int(np.asarray(state.skipped_in_row))
    return int(np.asarray(last_metrics(state)["skipped_in_row"]))


@places_arguments()
def eval_step(state: TrainState, batch: Batch, loss_fn: LossFn | None = None) -> Metrics:
    """Evaluate the loss function on a batch; returns the loss and its aux as means over all tokens.

    Args:
        state: any; it is not donated.
        batch: as for ``train_step``, but it need not be a multiple of ``accumulate``.
        loss_fn: by default the state's loss function. See ``TrainState.create``. A Linen module learns
            about evaluation only from its arguments, so pass a loss that calls ``model(x, train=False)``.
            Each function is compiled once: do not create a new one for every call.

    Raises:
        ConfigurationError: as ``train_step``.

    Examples:
        >>> bool(zerojax.eval_step(state, batch)["loss"] < metrics["loss"])
        True
    """
    spec = state.spec
    placed = place(spec, batch, 1)
    check_there(state)
    evaluate = _compiled(spec, _evaluate, (2,))
    return one_at_a_time(spec.mesh, evaluate(without_spec(state), placed, loss_fn or spec.loss_fn))


@places_arguments()
def predict_step[T: PyTree[Array]](
    state: TrainState, batch: Batch, fn: Callable[[Any, Batch], T], *, adapters: bool = True
) -> T:
    """Call a function of the model on each row of a batch: log-probabilities, scores, embeddings.

    Args:
        state: any; it is not donated.
        batch: as for ``eval_step``.
        fn: ``(model, batch) -> pytree of arrays``, whose leading axis counts rows. It is called with the
            model in evaluation mode and a device's rows, as a loss function is. Each function is compiled
            once: do not create a new one for every call. If devices share rows
            (``ZeroConfig.sequence_parallel``), it makes whole rows of its results by ``whole_rows``.
        adapters: False computes with the frozen weights alone, without the adapters of ``lora``. If nothing
            else is trained, that is the model from which the adapters began.

    Returns:
        The results of all rows: global arrays, spread over the devices by rows as the batch is. All devices
        that share a row have its results.

    Raises:
        ConfigurationError: as ``eval_step``; a result has another leading axis, or covers a part of the
            tokens; or ``adapters`` is False and there are none.

    Examples:
        >>> def outputs(model, batch):
        ...     return model(batch["x"])
        >>> zerojax.predict_step(state, batch, outputs).shape
        (8, 8)
    """
    spec = state.spec
    check_adapters(spec, adapters=adapters)
    placed = place(spec, batch, 1)
    check_there(state)
    predict = _compiled(spec, _predict, (2, 3))
    found = one_at_a_time(spec.mesh, predict(without_spec(state), placed, fn, adapters))
    return jax.tree.map(functools.partial(rows_once, spec), found)


def check_adapters(spec: TrainSpec, *, adapters: bool) -> None:
    """Refuse to leave out adapters if there are none, because the result would not be one of a base model.

    Raises:
        ConfigurationError: ``adapters`` is False, and the state has none.
    """
    if not adapters and spec.lora is None:
        raise ConfigurationError("adapters=False: the state has no adapters to leave out.")


@places_arguments()
def gradients(state: TrainState, batch: Batch) -> PyTree[Array]:
    """The mean gradients that ``train_step`` would pass to the optimizer; the state is not donated.

    Arguments and errors as ``train_step``; refused with local updates.

    Returns:
        Nested by path, fp32, stored like the parameters (``ParamLayout.stored_shape``).
    """
    spec = state.spec
    if spec.zero.every:
        raise ConfigurationError(
            "gradients: with local updates (ZeroConfig.every) each node has gradients of its own weights. "
            "For gradients of the outer weights, copy these to a state of another preset: "
            "put_params(other, gather_params(state))."
        )
    placed = place(spec, batch, spec.zero.accumulate)
    check_there(state)
    step = _compiled(spec, _mean_gradients)
    return one_at_a_time(spec.mesh, step(*_without_read_fields(state), placed))


def lower_train_step(state: TrainState, batch: Batch) -> jax.stages.Lowered:
    """The lowered step, for ahead-of-time compiles and audits.

    Args:
        state: a state, or an abstract one.
        batch: arrays or ShapeDtypeStructs with the global batch's shapes.
    """
    return _compiled_step(state.spec).lower(*_without_read_fields(state), abstract_batch(state.spec, batch))


def lower_eval_step(state: TrainState, batch: Batch) -> jax.stages.Lowered:
    """The lowered evaluation; arguments as ``lower_train_step``."""
    spec = state.spec
    evaluate = _compiled(spec, _evaluate, (2,))
    return evaluate.lower(without_spec(state), abstract_batch(spec, batch), spec.loss_fn)


def trace_train_step(state: TrainState, batch: Batch) -> jax.stages.Traced:
    """The traced step, whose ``jaxpr`` holds every collective; arguments as ``lower_train_step``."""
    return _compiled_step(state.spec).trace(*_without_read_fields(state), abstract_batch(state.spec, batch))


def _without_read_fields(state: TrainState) -> tuple[TrainState, _Read]:
    """The state without its spec and the fields that a step only reads, which is donated; and these fields.

    ``dataclasses.replace`` puts them back. ``TrainState.replace`` would drop replicas, as of other weights.
    """
    if state.spec.zero.weights_delta:
        return without_spec(state.replace(frozen={})), {"frozen": state.frozen}
    # At other stages every device has whole weights, and does not read the node's replica.
    replicas = state.replicas if state.spec.zero.stage == 3 else {}
    own = state.replace(frozen={}, replicas={}, current_replicas=bool(replicas))
    return without_spec(own), {"frozen": state.frozen, "replicas": replicas}


@functools.cache
def _warn_without_fp8(device: Any) -> None:
    """Log, once in a process, that a device has no fp8 matmuls."""
    if not has_fp8(device):
        warn(
            f'matmul_dtype="fp8" on {device.device_kind}, which has no fp8 matmuls (NVIDIA GPUs have them '
            "from compute capability 8.9 on): the same numbers come from a reference path, slower than bf16"
        )


def _compiler_options(spec: TrainSpec) -> CompilerOptions:
    return compiler_options(
        spec.mesh,
        separate_products=spec.zero.matmul_dtype == "fp8",
        kept_products=spec.zero.remat == "none",
        host_memory=bool(spec.zero.host),
        updates_in_backward=bool(spec.updated_in_backward),
    )


def _compiled(
    spec: TrainSpec, run: Callable[..., PyTree[Array]], static: tuple[int, ...] = ()
) -> jax.stages.Wrapped:
    """The compiled function of a module-level function and ``without_spec(state)``.

    Its ``static`` arguments are no arrays.
    """

    def make() -> jax.stages.Wrapped:
        return jax.jit(with_spec(spec, run), static_argnums=static, compiler_options=_compiler_options(spec))

    return spec.once(run.__name__, make)


def _compiled_step(spec: TrainSpec) -> jax.stages.Wrapped:
    if spec.tx is None:
        raise ConfigurationError(
            "the state has no optimizer, so it is for inference alone: to train it, create it with an optax "
            "transform (tx)."
        )

    def make() -> jax.stages.Wrapped:
        if spec.zero.matmul_dtype == "fp8":
            _warn_without_fp8(spec.mesh.devices.flat[0])
        fields = abstract_fields(spec)
        everyone = NamedSharding(spec.mesh, PartitionSpec())
        places: dict[str, Any] = shardings_of(fields) | {"frozen": {}}
        state = without_spec(TrainState(**places, spec=spec))
        return jax.jit(
            with_spec(spec, _train),
            donate_argnums=0,
            out_shardings=(state, everyone),
            compiler_options=_compiler_options(spec),
        )

    return spec.once("train", make)


@contextlib.contextmanager
def _uncollected() -> Generator[None]:
    """Pause Python's garbage collector while a step is traced.

    Tracing makes many objects, and few of them are garbage. Collections would take a third of its time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_uncollected()
def _train(state: TrainState, read: _Read, batch: Batch) -> tuple[TrainState, Metrics]:
    """A training step: passes, update, metrics. Its exchange begins before the passes and ends last."""
    spec, state = state.spec, dataclasses.replace(state, **read)
    exchange = FragmentExchange(spec) if spec.local_updates else Exchange(spec)
    passed = exchange.passes(state, batch, in_backward=bool(spec.updated_in_backward))
    after, taken, figures = exchange.update(state, passed)
    fields, metrics = exchange.finish(state, passed, after, taken, figures)
    return without_spec(state.replace(step=state.step + 1, frozen={}, **fields)), metrics


@_uncollected()
def _mean_gradients(state: TrainState, read: _Read, batch: Batch) -> PyTree[Array]:
    """The gradients of the mean loss over all tokens."""
    passed = Exchange(state.spec).passes(dataclasses.replace(state, **read), batch)
    return jax.tree.map(lambda x: x / passed.sums.tokens, passed.gradients)


@_uncollected()
def _evaluate(state: TrainState, batch: Batch, loss_fn: LossFn) -> Metrics:
    spec = dataclasses.replace(state.spec.reading, loss_fn=loss_fn)

    def local(shards: Shards, batch: Batch) -> Metrics:
        return passes.evaluate(spec, shards, batch).means()

    places = (batch_specs(batch),)
    return on_devices(spec, local, state.shards, batch, in_specs=places, out_specs=REPLICATED)


@_uncollected()
def _predict[T: PyTree](state: TrainState, batch: Batch, fn: Callable[[Any, Batch], T], adapters: bool) -> T:
    spec = state.spec.reading
    local = functools.partial(passes.predict, spec, fn=fn, adapters=adapters)
    places = (batch_specs(batch),)
    return on_devices(spec, local, state.shards, batch, in_specs=places, out_specs=BY_ROWS)
