"""Forecasts of a run on a cluster for each way of sharding, and a recommendation."""

import dataclasses
import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from zerojax.analysis.links import LEAST_EVERY, expected_loss
from zerojax.analysis.plan.choices import (
    HostChoice,
    choose_host,
    choose_remat,
    choose_state_spread,
    fits,
    host_needed,
)
from zerojax.analysis.plan.cluster import Cluster, on_world
from zerojax.analysis.plan.hops import HopPlan, hops_of, usual_bytes
from zerojax.analysis.plan.memory import PredictedMemory, predict_memory
from zerojax.analysis.plan.speed import StepTime, hop_seconds, predict_step
from zerojax.analysis.plan.work import Work, work_of
from zerojax.errors import ConfigurationError
from zerojax.formatting import duration
from zerojax.models.config import GPTConfig
from zerojax.sharding.mesh import MeshShape
from zerojax.train.spec import TrainSpec
from zerojax.zero_config.config import PRESETS, Preset, ZeroConfig
from zerojax.zero_config.options import MATMUL_WEIGHTS

AS_CONFIGURED = "as configured"
IN_BREADTH = " in breadth"
COMPARED: tuple[Preset, ...] = ("zero3", "zero++", "delta", "local")
"""The presets with a forecast. "zero++-paper" sends as much between nodes as "zero++", and rounds more."""
EXACT = ("stage 1", "stage 2", "zero3", "zero3" + IN_BREADTH)
_MAX_SEQUENCES = 1 << 14
_MAX_NODES = 1 << 12
_ROW_TOKENS = 1024
"""Row lengths are tried in multiples of this many tokens for each device that shares a row."""
_MAX_ROW = 1 << 14
"""The largest such multiple to try."""
LONGEST = _ROW_TOKENS * _MAX_ROW
"""The most tokens of a row to try, for each device that shares it."""
_WORTH_IT = 1.03
_WORTH_LOCAL_UPDATES = 1.1
"""The least speed-up to recommend local updates for, because they train differently from the other ways."""
_MOST_EVERY = 1 << 10
_NOTHING = 1e-3
"""A smaller share of a step does not count as waiting."""
_DECIDED = (
    *("stage", "accumulate_order", "weights", "weights_delta", "delta_resync", "local_weights", "hpz"),
    *("grads", "grads_hops", "grad_sync", "block_size", "rounding", "rotation", "error_feedback", "chunks"),
    *("every", "outer_learning_rate", "outer_momentum", "outer_delay", "outer_mixing"),
)
"""Options that a preset or stage decides. Forecasts take all other options from the config."""


@dataclass(frozen=True)
class Prediction:
    """A step on the cluster.

    Attributes:
        spec: of the step, on the cluster's mesh.
        work: of a micro-batch on one device.
        cluster: where it runs.
    """

    spec: TrainSpec
    work: Work
    cluster: Cluster

    @functools.cached_property
    def memory(self) -> PredictedMemory:
        """One device's peak memory."""
        return predict_memory(self.spec, self.work, workspace=self.cluster.gpu.workspace)

    @property
    def fits(self) -> bool:
        """Whether both fit: the device's memory into its budget, and the host's memory into the host."""
        return fits(self.memory, self.cluster)

    @functools.cached_property
    def hops(self) -> tuple[HopPlan, ...]:
        """The hops of a step, with the bytes that each sends."""
        return hops_of(self.spec, self.work)

    @functools.cached_property
    def time(self) -> StepTime:
        """Seconds of a step, and of its parts."""
        return predict_step(self.spec, self.work, self.hops, self.memory, self.cluster)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the whole cluster."""
        tokens = self.spec.zero.accumulate * self.work.tokens * self.cluster.world.size
        return tokens / self.time.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over the peak FLOP/s of the cluster's GPUs, 0 to 1."""
        return self.spec.zero.accumulate * self.work.model_flops / self.time.seconds / self.cluster.gpu.flops


@dataclass(frozen=True)
class Forecast(Prediction):
    """One way of sharding on the cluster.

    Attributes:
        name: "zero3", "zero++", "delta", "local", "stage 1", "stage 2", or "as configured". With several
            micro-batches also "zero3 in breadth" and so on (``ZeroConfig.accumulate_order``). The stages
            below 3 have no fp8 matmuls. Frozen weights and activations in host memory exclude these stages.
            ``frozen_spread="world"`` excludes all but zero3. One node, or the optimizer in host memory,
            excludes "local".
        largest: the most sequences per device and micro-batch that fit; 0 if none does.
        largest_mfu: the MFU with ``largest`` sequences; 0 if none fits.
        fewest_nodes: the fewest nodes on which the planned batch per device fits; None if more nodes do not
            help.
    """

    name: str
    largest: int
    largest_mfu: float
    fewest_nodes: int | None

    @property
    def every(self) -> int:
        """As ``ZeroConfig.every``; 0 without local updates."""
        return self.spec.zero.every


@dataclass(frozen=True)
class Outlook:
    """A run on a cluster; ``print`` it.

    Attributes:
        cluster: where the run is planned.
        sequences: sequences per micro-batch of a device, or of the devices that share them.
        length: tokens of a sequence.
        configured: name of the forecast for the config's own options.
        forecasts: one for each way of sharding.
        advice: the recommended way of sharding, and the reason.
        host: recommended parts to keep in host memory; None if the config fits as it is.
        remat: a faster ``ZeroConfig.remat`` that fits, and its cost; None if there is none.
        spread: the cost of ``state_spread="node"``; None if that does not fit, or is so already.
        longest: the most tokens of a sequence that fit with the config's own options. 0 if not even the
            fewest fit, None if not searched.
    """

    cluster: Cluster
    sequences: int
    length: int
    configured: str
    forecasts: tuple[Forecast, ...]
    advice: str
    host: HostChoice | None = None
    remat: str | None = None
    spread: str | None = None
    longest: int | None = None

    @property
    def own(self) -> Forecast:
        """The forecast for the config's own options."""
        return next(forecast for forecast in self.forecasts if forecast.name == self.configured)

    @property
    def zero(self) -> ZeroConfig:
        """The config's own options."""
        return self.own.spec.zero

    @property
    def batch(self) -> int:
        """Sequences per step of the whole cluster."""
        zero = self.zero
        return self.sequences * zero.accumulate * self.cluster.world.size // zero.sequence_parallel

    def to_dict(self) -> dict[str, Any]:
        """The outlook as plain data for JSON, in bytes and seconds."""
        return {
            "prediction": True,
            "nodes": self.cluster.nodes,
            "local": self.cluster.local,
            "memory_budget": self.cluster.budget,
            "sequences": self.sequences,
            "sequence_parallel": self.zero.sequence_parallel,
            "batch": self.batch,
            "configured": self.configured,
            "fp8": self.zero.matmul_dtype == "fp8",
            "advice": self.advice,
            "host": None if self.host is None else dataclasses.asdict(self.host),
            "remat": self.remat,
            "spread": self.spread,
            "longest": self.longest,
            "forecasts": [_to_dict(forecast, self.cluster) for forecast in self.forecasts],
        }


def foresee(
    spec: TrainSpec,
    config: GPTConfig,
    cluster: Cluster,
    *,
    sequences: int,
    length: int,
    optimizer: str,
    streaming: Callable[[], TrainSpec] | None = None,
    longest: bool = False,
) -> Outlook:
    """Predict a decoder's run with its own options, the presets and the lower stages.

    Presets and stages change how trained weights and gradients are stored and sent. Frozen weights, dtypes of
    matmuls and recomputation are the config's in every forecast.

    Args:
        spec: the decoder's spec, built for any mesh with the config's own options.
        config: the decoder's shape.
        cluster: where to run.
        sequences: sequences per micro-batch of a device, or of the devices that share them.
        length: tokens of a sequence.
        optimizer: its name in ``[optimizer]``. The quality of local updates depends on it.
        streaming: makes the same spec with the optimizer in host memory, or raises a ConfigurationError. None
            excludes that proposal.
        longest: whether to search for the longest sequences that fit.

    Raises:
        ConfigurationError: fewer than one sequence, or sequences longer than the model takes.
    """
    if sequences < 1:
        raise ConfigurationError(
            f"sequences = {sequences}: give at least one sequence per device and micro-batch"
        )
    own, ways = spec.zero, dict(_ways(spec.zero, cluster))
    configured = next((name for name, zero in ways.items() if zero == own), AS_CONFIGURED)
    if configured == AS_CONFIGURED:
        ways = {AS_CONFIGURED: own} | ways
    run = _Run(spec, config, cluster, sequences, length, streaming)
    forecasts = tuple(run.forecast(name, zero) for name, zero in ways.items())

    def hiding(name: str) -> Forecast:
        powers = [1 << n for n in range(_MOST_EVERY.bit_length()) if 1 << n >= LEAST_EVERY]
        tried = ((every, run.predict(ways[name].replace(every=every)).time) for every in powers)
        every = next((every for every, time in tried if _hidden(time)), _MOST_EVERY)
        return run.forecast(name, ways[name].replace(every=every))

    def memory_and_time(zero: ZeroConfig) -> tuple[PredictedMemory, StepTime]:
        predicted = run.predict(zero)
        return predicted.memory, predicted.time

    found = Outlook(
        cluster=cluster,
        sequences=sequences,
        length=length,
        configured=configured,
        forecasts=forecasts,
        advice=recommend(forecasts, cluster, sequences, hiding, optimizer),
        longest=run.longest() if longest else None,
    )
    if found.own.fits:
        spread = choose_state_spread(own, cluster, memory_and_time)
        return dataclasses.replace(found, spread=spread, remat=choose_remat(own, cluster, memory_and_time))
    chosen = choose_host(configured, own, cluster, memory_and_time, found.own.fewest_nodes)
    return dataclasses.replace(found, host=chosen)


@dataclass
class _Run:
    """The run to predict; the fields are the arguments of ``foresee``."""

    spec: TrainSpec
    config: GPTConfig
    cluster: Cluster
    sequences: int
    length: int
    streaming: Callable[[], TrainSpec] | None
    specs: dict[tuple[MeshShape, ZeroConfig], TrainSpec] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def streamed(self) -> TrainSpec | None:
        """The spec with the optimizer in host memory; None if that is not to be proposed."""
        return None if self.streaming is None else self.streaming()

    def spec_of(self, zero: ZeroConfig, world: MeshShape) -> TrainSpec:
        """The spec with these options on this mesh."""
        if (world, zero) not in self.specs:
            streams = zero.updates_by_layers and self.spec.layerwise is None
            streamed = self.streamed if streams else None
            self.specs[world, zero] = on_world(streamed or self.spec, world, zero)
        return self.specs[world, zero]

    def predict(
        self,
        zero: ZeroConfig,
        *,
        world: MeshShape | None = None,
        sequences: int | None = None,
        shape: GPTConfig | None = None,
        length: int | None = None,
    ) -> Prediction:
        """Predict a step with these options; the other arguments replace the run's own."""
        spec = self.spec_of(zero, world or self.cluster.world)
        own, length = self.sequences if sequences is None else sequences, length or self.length
        generation = self.cluster.gpu.generation
        work = work_of(spec, shape or self.config, sequences=own, length=length, generation=generation)
        return Prediction(spec, work, self.cluster)

    def forecast(self, name: str, zero: ZeroConfig) -> Forecast:
        """The forecast for some options."""
        own, local = self.predict(zero), self.cluster.local

        def fits(shape: GPTConfig, sequences: int) -> bool:
            return self.predict(zero, sequences=sequences, shape=shape).fits

        largest = _most(fits, self.config, _MAX_SEQUENCES)
        nodes = range(1, _MAX_NODES + 1)
        # More nodes never hold more.
        few = bisect_left(nodes, True, key=lambda n: self.predict(zero, world=MeshShape(n, local)).fits)
        return Forecast(
            spec=own.spec,
            work=own.work,
            cluster=own.cluster,
            name=name,
            largest=largest,
            largest_mfu=self.predict(zero, sequences=largest).mfu if largest else 0.0,
            fewest_nodes=nodes[few] if few < len(nodes) else None,
        )

    def longest(self) -> int:
        """The most tokens of a sequence that fit, in multiples of ``_ROW_TOKENS`` a device.

        Only a table of learned positions limits them.
        """
        zero, config = self.spec.zero, self.config
        step = _ROW_TOKENS * zero.sequence_parallel
        most = _MAX_ROW if config.positions == "rope" else config.max_seq_len // step

        def fits(shape: GPTConfig, number: int) -> bool:
            length = number * step
            shape = dataclasses.replace(shape, max_seq_len=max(shape.max_seq_len, length))
            return self.predict(zero, shape=shape, length=length).fits

        return step * _most(fits, config, most)


def _ways(own: ZeroConfig, cluster: Cluster) -> Iterator[tuple[str, ZeroConfig]]:
    """The presets and stages that fit the frozen weights and the cluster, with the config's other options."""
    defaults = {field.name: field.default for field in dataclasses.fields(own) if field.name in _DECIDED}
    zero3 = own.replace(update_in_backward=False, **defaults)
    if own.frozen:
        # Frozen weights are encoded in blocks of this size; a preset may still set its own.
        zero3 = zero3.replace(block_size=own.block_size)
    for name in COMPARED:
        preset = PRESETS[name]
        if own.frozen_spread == "world" and name != "zero3":
            continue
        if "every" in preset and cluster.nodes == 1:
            continue
        chosen = {**preset, "update_in_backward": own.update_in_backward}
        ways: dict[str, dict[str, Any]] = {name: chosen}
        if own.accumulate > 1:
            ways[name + IN_BREADTH] = {**chosen, "accumulate_order": "breadth"}
        for way, options in ways.items():
            # Some presets exclude updates in the backward pass, or fp8 together with host memory.
            with suppress(ConfigurationError):
                yield way, zero3.replace(**options)
    if not own.frozen and not own.in_host("activations") and not own.update_in_backward:
        for stage in (1, 2):
            yield f"stage {stage}", zero3.replace(stage=stage, matmul_dtype="compute", fp8=MATMUL_WEIGHTS)


def _most(fits: Callable[[GPTConfig, int], bool], config: GPTConfig, most: int) -> int:
    """The largest number up to ``most`` that fits, or one within 1/256 of it; 0 if none fits.

    Memory falls where more tokens get another tile size, so the search needs a bound. With tiles of one token
    memory always grows, and is never larger.
    """
    shapes = config, dataclasses.replace(config, token_tile=1)
    numbers = range(1, most + 1)
    least, bound = (bisect_left(numbers, True, key=lambda n, c=c: not fits(c, n)) for c in shapes)
    tried = range(bound, least, -max(1, bound // 256))
    return next((number for number in tried if fits(config, number)), least)


def recommend(
    forecasts: tuple[Forecast, ...],
    cluster: Cluster,
    sequences: int,
    hiding: Callable[[str], Forecast],
    optimizer: str,
) -> str:
    """Recommend a way of sharding, with the reason, in one or two sentences.

    ``hiding`` makes the forecast of local updates, given their name. Its ``every`` is the smallest power of
    two from ``LEAST_EVERY`` on with which compute hides the exchange, or the largest tried.
    """
    fitting = [forecast for forecast in forecasts if forecast.fits]
    together = [forecast for forecast in fitting if not forecast.every]
    if not together:
        return _none_fits(tuple(forecast for forecast in forecasts if not forecast.every), cluster)
    best, why = _best_exchange(together)
    chosen = best
    local = [forecast for forecast in fitting if forecast.every and forecast.name != AS_CONFIGURED]
    fastest_local = min(local, key=_seconds, default=None)
    if fastest_local and best.time.seconds > _WORTH_LOCAL_UPDATES * fastest_local.time.seconds:
        chosen = hiding(fastest_local.name)
        why = _why_local(chosen, best, optimizer)
    settings = [f"zero.every = {chosen.every}"] if chosen.every else []
    settings += ['zero.accumulate_order = "breadth"'] if chosen.name.endswith(IN_BREADTH) else []
    setting = f" ({', '.join(settings)})" if settings else ""
    ways = [best] if chosen is best else [chosen, best]
    more = "".join(_with_more(forecast, sequences) for forecast in ways)
    return f"Take {chosen.name}{setting}: {why}.{more}"


def _with_more(forecast: Forecast, sequences: int) -> str:
    """A sentence about the MFU with more sequences; "" if no more fit."""
    if forecast.largest <= sequences:
        return ""
    most = "the most that fit" if forecast.largest < _MAX_SEQUENCES else "and at least as many fit"
    return (
        f" With {forecast.largest} sequences a device, {most}, the MFU of {forecast.name} would "
        f"be {forecast.largest_mfu:.0%}."
    )


def _best_exchange(fitting: list[Forecast]) -> tuple[Forecast, str]:
    """The best way in which all nodes train the same weights, and the reason."""
    fastest = min(fitting, key=_seconds)
    exact = [forecast for forecast in fitting if forecast.name in EXACT]
    nearest = min(exact, key=_seconds, default=None)
    if nearest and nearest.time.seconds <= _WORTH_IT * fastest.time.seconds:
        return nearest, "it is exact, and no other way that fits is more than 3% faster"
    reason = f"its step waits {duration(fastest.time.waiting)} for the network"
    if nearest is None:
        return fastest, f"{reason}, and no exact way fits"
    ratio, waiting = nearest.time.seconds / fastest.time.seconds, duration(nearest.time.waiting)
    return fastest, f"{reason}, the step of exact {nearest.name} {waiting}: {ratio:.2f} times the speed"


def _why_local(local: Forecast, other: Forecast, optimizer: str) -> str:
    """The reason to prefer local updates to another way."""
    waits = "hides its exchange behind compute"
    if not _hidden(local.time):
        waits = f"waits {duration(local.time.waiting)} for the network"
    ratio = other.time.seconds / local.time.seconds
    return (
        f"its step {waits}, the step of {other.name} waits {duration(other.time.waiting)}: {ratio:.2f} times "
        f"the speed. Each node then trains its own weights: {expected_loss(local.every, optimizer)}"
    )


def _hidden(time: StepTime) -> bool:
    return time.waiting < _NOTHING * time.seconds


def _seconds(forecast: Forecast) -> float:
    return forecast.time.seconds


def _none_fits(forecasts: tuple[Forecast, ...], cluster: Cluster) -> str:
    smallest = min(forecasts, key=lambda forecast: forecast.memory.total)
    advice = (
        f"Nothing fits: {smallest.name} takes the least, {smallest.memory.total / 1e9:.1f} GB, but a GPU has "
        f"{cluster.budget / 1e9:.1f}."
    )
    if smallest.largest:
        return f"{advice} With {smallest.largest} sequences a device it fits: raise train.accumulate instead."
    if smallest.fewest_nodes:
        return f"{advice} It fits on {smallest.fewest_nodes} nodes."
    return f'{advice} More nodes do not help: take remat = "full", or GPUs with more memory.'


def _to_dict(forecast: Forecast, cluster: Cluster) -> dict[str, Any]:
    def hop_dict(hop: HopPlan) -> dict[str, Any]:
        seconds = hop_seconds(hop, cluster)
        names = ("phase", "axis", "formats", "usual", "local_bytes", "node_bytes")
        return {name: getattr(hop, name) for name in names} | {
            "local_seconds": seconds.local,
            "node_seconds": seconds.node,
        }

    sent = usual_bytes(forecast.hops)
    plain = ("name", "every", "fits", "tokens_per_second", "mfu", "largest", "largest_mfu", "fewest_nodes")
    return {name: getattr(forecast, name) for name in plain} | {
        "memory": {**forecast.memory.kinds, "total": forecast.memory.total},
        "host_memory": {**forecast.memory.host, "needed": host_needed(forecast.memory, cluster)},
        "hops": [hop_dict(hop) for hop in forecast.hops],
        "local_bytes": sent.local,
        "node_bytes": sent.node,
        "between_nodes": sent.node * cluster.local,
        "seconds": forecast.time.to_dict(),
    }
