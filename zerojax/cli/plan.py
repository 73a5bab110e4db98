"""``zerojax plan CONFIG``: memory and communication of a run, and its predicted speed on a cluster."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerojax.analysis.gpus import MATMUL_EFFICIENCY, find_gpu
from zerojax.analysis.link_report import LinkReport
from zerojax.analysis.plan import plan_state
from zerojax.analysis.plan.cluster import MEMORY_FRACTION, Cluster
from zerojax.analysis.plan.engines import Engines, foresee_engines
from zerojax.analysis.plan.outlook import Outlook, foresee
from zerojax.analysis.plan.outlook_tables import outlook_tables
from zerojax.analysis.plan.work import sequences_of
from zerojax.cli import on_config
from zerojax.cli.savings import Savings
from zerojax.cli.trained import abstract_run
from zerojax.errors import ConfigurationError
from zerojax.formatting import plain_text
from zerojax.models import describe_parameters
from zerojax.posttrain.roles.memory import RoleMemory
from zerojax.posttrain.settings import PREFERENCES, WITH_ROLLOUTS, rollout_rows
from zerojax.run.config import MeshSection, RunConfig, with_settings
from zerojax.train.spec import TrainSpec
from zerojax.validation.rates import bytes_per_second


@dataclass(frozen=True)
class Options(on_config.Options):
    """Show the memory and communication of a run: units, wire formats, bytes, memory by kind.

    With --gpu, predict memory, step time and MFU under every preset, the largest batch and the smallest
    cluster, for a cluster of such GPUs. Computed from formulas; needs none of the devices.

    Attributes:
        json: Print JSON instead of tables.
        gpu: GPUs of the cluster to predict for: h100, h200, a100-80 and others (an unknown name lists them).
        nodes: Number of nodes; by default mesh.nodes.
        gpus_per_node: GPUs of each node; by default mesh.local.
        bandwidth: Network bandwidth of a node in each direction, all adapters together, such as 100gbit.
        links: File of `zerojax links --json`, measured between such nodes; replaces --bandwidth.
        sequences: Sequences per micro-batch and device, or group of devices that share them
            (zero.sequence_parallel); by default from train.batch_size, at least 1.
        longest: Find the longest sequences that fit, with --sequences of them (by default 1).
        picture: PNG file to draw the prediction to.
        memory_fraction: Fraction of the GPU's memory that JAX uses (XLA_CLIENT_MEM_FRACTION).
        efficiency: Fraction of the GPU's peak that matmuls reach.
        peak_tflops: The GPU's dense bf16 peak; overrides the listed one.
        memory_gb: The GPU's memory; overrides the listed one.
        memory_bandwidth: The GPU's memory bandwidth in GB/s; overrides the listed one.
        local_bandwidth: Measured rate at which a GPU sends to others in its node during compute, in GB/s.
        host_memory_gb: The memory of each node's host.
        host_bandwidth: Measured rate of copies between a GPU and its host in one direction, in GB/s.
        engine_tokens: Tokens per second that all inference engines generate together; predicts a rollout with
            engines and its updates.
        engine_bandwidth: Network bandwidth of an engine's host; by default --bandwidth.
        changed: Share of the weights, as engines serve them, that the updates on a rollout change.
    """

    json: bool = False
    gpu: str | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    bandwidth: str | None = None
    links: Path | None = None
    sequences: int | None = None
    longest: bool = False
    picture: Path | None = None
    memory_fraction: float = MEMORY_FRACTION
    efficiency: float = MATMUL_EFFICIENCY
    peak_tflops: float | None = None
    memory_gb: float | None = None
    memory_bandwidth: float | None = None
    local_bandwidth: float | None = None
    host_memory_gb: float | None = None
    host_bandwidth: float | None = None
    engine_tokens: float | None = None
    engine_bandwidth: str | None = None
    changed: float = 0.01


def run(arguments: list[str]) -> None:
    """Compute and print the plan or the prediction."""
    options, settings = on_config.parse(Options, "plan", arguments)
    if options.gpu is not None:
        _predict(options, settings, options.gpu)
        return
    _refuse_without_gpu(options)
    state, _ = abstract_run(settings)
    plan, savings = plan_state(state), Savings(settings, state.spec)
    roles = None
    if settings.posttrain.method != "none":
        roles = RoleMemory.of(settings, state.spec)
    if options.json:
        more = {} if roles is None else {"roles": dataclasses.asdict(roles)}
        print(json.dumps({**plan.to_dict(), "savings": savings.to_dict(), **more}, indent=2))
        return
    print(plan, savings.sent_line(), savings.held_line(), sep="\n")
    if settings.model.experts:
        print(describe_parameters(settings.model))
    if roles is not None:
        print(plain_text(roles.table()))


def _refuse_without_gpu(options: Options) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(Options)}
    own = fields.keys() - {field.name for field in dataclasses.fields(on_config.Options)} - {"gpu", "json"}
    given = sorted(name for name in own if getattr(options, name) != fields[name])
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigurationError(
            f"{named}: only a prediction for a cluster of GPUs reads this. Name its GPUs, such as --gpu h100"
        )


def _predict(options: Options, settings: RunConfig, gpu: str) -> None:
    cluster = _cluster(options, settings.mesh, gpu)
    sequences = 1 if options.longest and options.sequences is None else options.sequences
    engines = _engines(options, settings, cluster)
    outlook = _outlook(sequences, settings, cluster, longest=options.longest)
    with_engines = None
    if engines is not None:
        rows, rollout = rollout_rows(settings), settings.posttrain
        with_engines = foresee_engines(
            outlook, engines, rows=rows, epochs=rollout.epochs, tokens=rollout.max_new_tokens
        )
    if options.picture is not None:
        # Matplotlib takes longer to import than all of zerojax: no other command waits for it.
        from zerojax.analysis.plan.picture import draw_outlook

        draw_outlook(outlook, options.picture, Path(str(options.config)).stem)
    if options.json:
        more = {} if with_engines is None else {"engines": with_engines.to_dict()}
        print(json.dumps(outlook.to_dict() | more, indent=2))
        return
    print(plain_text(outlook_tables(outlook), width=140))
    if with_engines is not None:
        print(with_engines)


def _engines(options: Options, settings: RunConfig, cluster: Cluster) -> Engines | None:
    if options.engine_tokens is None:
        if options.engine_bandwidth is not None or options.changed != Options.changed:
            raise ConfigurationError(
                "--engine-bandwidth and --changed describe inference engines: add --engine-tokens"
            )
        return None
    if settings.posttrain.method not in WITH_ROLLOUTS:
        raise ConfigurationError(
            f"--engine-tokens: only posttrain.method {' and '.join(WITH_ROLLOUTS)} generate rollouts, and "
            f'this is "{settings.posttrain.method}"'
        )
    bandwidth = cluster.bandwidth
    if options.engine_bandwidth is not None:
        bandwidth = bytes_per_second(options.engine_bandwidth, "--engine-bandwidth")
    count = max(1, len(settings.posttrain.engines))
    return Engines(count, options.engine_tokens, bandwidth, options.changed)


def _cluster(options: Options, mesh: MeshSection, name: str) -> Cluster:
    known = find_gpu(name)
    nodes, local = options.nodes or mesh.nodes, options.gpus_per_node or mesh.local
    if not (nodes and local):
        raise ConfigurationError("--gpu predicts for a cluster: give its size by --nodes and --gpus-per-node")
    scales = {
        "flops": (options.peak_tflops, 1e12),
        "memory": (options.memory_gb, 1e9),
        "memory_rate": (options.memory_bandwidth, 1e9),
    }
    corrected: dict[str, Any] = {
        field: value * unit for field, (value, unit) in scales.items() if value is not None
    }
    if options.bandwidth and options.links:
        raise ConfigurationError(
            "--bandwidth and --links exclude each other, because --links has measured rates: leave one out"
        )
    return Cluster(
        nodes=nodes,
        local=local,
        gpu=dataclasses.replace(known, **corrected),
        bandwidth=bytes_per_second(options.bandwidth, "--bandwidth") if options.bandwidth else 0,
        local_bandwidth=_giga(options.local_bandwidth),
        host_memory=_giga(options.host_memory_gb),
        host_bandwidth=_giga(options.host_bandwidth),
        efficiency=options.efficiency,
        memory_fraction=options.memory_fraction,
        links=None if options.links is None else LinkReport.read(options.links),
    )


def _giga(value: float | None) -> float | None:
    return None if value is None else 1e9 * value


def _outlook(sequences: int | None, settings: RunConfig, cluster: Cluster, *, longest: bool) -> Outlook:
    train = settings.train
    # The model's parameters and units do not depend on the mesh: two nodes stand for all.
    mesh = MeshSection(nodes=2, local=settings.zero.sequence_parallel)
    anywhere = dataclasses.replace(settings, mesh=mesh)
    state, _ = abstract_run(anywhere)

    def streaming() -> TrainSpec:
        return abstract_run(with_settings(anywhere, {"zero": {"host": ["optimizer"]}}))[0].spec

    if sequences is None:
        rows = train.batch_size * (2 if settings.posttrain.method in PREFERENCES else 1)  # two rows a pair
        sequences = sequences_of(rows, cluster.world.size, state.spec.zero)
    return foresee(
        state.spec,
        settings.model,
        cluster,
        sequences=sequences,
        length=train.sequence_length,
        optimizer=settings.optimizer.name,
        streaming=streaming,
        longest=longest,
    )
