#!/usr/bin/env python3
"""Train a model under several wire formats with several seeds, and say how far each ends from the exact run.

    scripts/bench/convergence.py scripts/bench/convergence.toml --seeds 0 1 2 --minutes 30 --json runs.json

Runs of one seed begin with the same weights and see the same data in the same order, so only the format
differs. The result is each run's difference from the exact run ("zero3") of its seed. Seeds show how much of
it is chance. The first seed of all variants is trained before the second of any.

The JSON file gets each run when it is done; a run that fails is reported at the end, after all others.
Started again with the same file, the command trains the missing runs. Unless you pass data (--text 0), the
text is collected on this machine: see machine_text.py.

A variant may name its learning rate: "local-64@1e-3". With --tuned, each variant, also the exact one, trains
the seeds after the first only at the rate that was best with the first.

It runs as one process, or as one per node (zerojax launch, zerojax emulate) with the folder in common.

With --init-from every run fine-tunes the weights of a trained run (zerojax train) on text cut into that run's
tokens, and the table gives perplexities.
"""

import json
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import machine_text
from machine_text import KINDS, Kind
from paired import Run, by_step, draw, in_perplexity, table
from runs_file import RunsFile
from trainees import Base, Trainee, train

from zerojax import ZeroError, cli
from zerojax.cli import on_config
from zerojax.cli.cluster import joined_cluster
from zerojax.multihost.agreement import run_on_process_zero
from zerojax.run.build import RunSetup, is_first
from zerojax.run.config import DataSection, RunConfig, with_settings
from zerojax.run.data.dataset import open_dataset
from zerojax.run.data.prepare import prepare

EXACT = "zero3"
DELTA: dict[str, Any] = {
    "preset": "delta",
    "weights": "int4",
    "grads": ("int8", "int4"),
    "block_size": 128,
    "rotation": 32,
    "rounding": "nearest",
}
EXACT_GRADIENTS: dict[str, Any] = {"grads": ("compute", "compute"), "rotation": 0}
ZERO_PP: dict[str, Any] = {"preset": "zero++-paper", "block_size": 256}
DIRECT: dict[str, Any] = {**ZERO_PP, **EXACT_GRADIENTS}
LOCAL: dict[str, Any] = {
    "preset": "local",
    "weights": "int4",
    "grads": ("compute", "int4"),
    "block_size": 128,
    "rotation": 32,
    "error_feedback": True,
    "outer_learning_rate": 0.7,
    "outer_momentum": 0.9,
    "outer_delay": 2,
    "outer_mixing": 0.5,
}
SUM: dict[str, Any] = {"outer_learning_rate": 1.0, "outer_momentum": 0.5, "outer_mixing": 0.0}
LOCAL_KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "-sum": SUM,
    "-exact": {"weights": "fp32", "grads": ("compute", "fp32"), "rotation": 0, "error_feedback": False},
}
"""By what the names of local updates end in, the keys in which these differ from ``LOCAL``."""
VARIANTS: dict[str, dict[str, Any]] = {
    EXACT: {"preset": "zero3"},
    "delta-stochastic": {**DELTA, "rounding": "stochastic"},
    "delta-nearest": DELTA,
    **{
        f"delta-node{kind}": {**DELTA, "state_spread": "node", **keys}
        for kind, keys in {
            "": {"rounding": "stochastic"},
            "-int8": {"rounding": "stochastic", "weights": "int8"},
            "-nearest-feedback": {"error_feedback": True},
        }.items()
    },
    "zero++-256": ZERO_PP,
    "zero++-128": {**ZERO_PP, "block_size": 128},
    "zero++-stochastic": {**ZERO_PP, "rounding": "stochastic"},
    "zero++-int8-local": {**ZERO_PP, "grads": ("int8", "int4")},
    "zero++-rotated": {**ZERO_PP, "rotation": 32},
    "zero++-int8-local-rotated": {**ZERO_PP, "grads": ("int8", "int4"), "rotation": 32},
    "delta-stochastic-unrotated": {**DELTA, "rounding": "stochastic", "rotation": 0},
    "delta-nearest-feedback": {**DELTA, "error_feedback": True},
    "delta-stochastic-int8": {**DELTA, "rounding": "stochastic", "grads": ("int8", "int8")},
    **{f"weights-{fmt}": {**DIRECT, "weights": fmt} for fmt in ("int8", "fp6", "int4", "int2")},
    **{f"deltas-{fmt}": {**DELTA, **EXACT_GRADIENTS, "weights": fmt} for fmt in ("int8", "int4", "int2")},
    "zero3-fp8": {"preset": "zero3", "matmul_dtype": "fp8"},
    "delta-fp8": {**DELTA, "rounding": "stochastic", "matmul_dtype": "fp8"},
    "zero3-bf16-moments": {"preset": "zero3", "moments": "bfloat16"},
    "zero3-float8-moments": {"preset": "zero3", "moments": "float8"},
    **{
        f"local-{every}{kind}": {**LOCAL, **keys, "every": every}
        for every in (16, 32, 64, 128)
        for kind, keys in LOCAL_KINDS.items()
    },
}
"""By name, the keys of [zero] that they set, those that a preset may later change included."""


@dataclass(frozen=True)
class Options(on_config.Options):
    """Train variants x seeds and compare them; each setting of the config can be overridden.

    Attributes:
        json: The file of results, to begin or to go on with.
        variants: Which, in this order; the first seed of all of them comes first. "@RATE" behind a name sets
            the learning rate.
        seeds: Of the weights, the data order and the random bits.
        tuned: Train seeds after the first with the best of each variant's learning rates only.
        minutes: Begin no run that would end later than so many minutes after the start; 0 runs all.
        init_from: A run's folder, whose weights and tokenizer all runs begin with.
        text: Megabytes of this machine's text to train on; 0 reads data.source as it is.
        kinds: Which kinds of it.
        folder: Where text and tokens are kept.
        picture: A PNG to draw.
    """

    json: Path = Path("build/convergence/runs.json")
    variants: tuple[str, ...] = (EXACT, "delta-stochastic", "zero++-256")
    seeds: tuple[int, ...] = (0, 1, 2)
    tuned: bool = False
    minutes: float = 0
    init_from: Path | None = None
    text: float = 300
    kinds: tuple[Kind, ...] = tuple(KINDS)
    folder: Path = Path("build/convergence")
    picture: Path | None = None


def main() -> None:
    """Read the command line and do what it asks for."""
    begun = time.monotonic()
    try:
        options, config = on_config.parse(Options, "convergence", sys.argv[1:])
        with joined_cluster(config.mesh, config.cluster):
            run(options, config, begun)
    except ZeroError as error:
        raise SystemExit(cli.report(error)[0]) from error


def run(options: Options, config: RunConfig, begun: float) -> None:
    """Train what is missing, print the table, draw the picture.

    Raises:
        ZeroError: a variant that is not there, settings that contradict each other, no trained run to begin
            with, a file of other runs.
    """
    if options.init_from:
        config = with_tokenizer_of(options.init_from, config)
    for name in options.variants:
        with_variant(config, name)
    results = RunsFile(options.json, config)
    missing = [(name, seed) for seed in options.seeds for name in options.variants]
    missing = [run for run in missing if run not in results.done]
    failed = train_all(missing, results, options, config, begun) if missing else {}
    runs, quantity = results.content["runs"], "validation loss"
    if options.tuned:
        runs = with_best_rates(runs, options.seeds[0])
    if options.init_from:
        runs, quantity = in_perplexity(runs), "perplexity"
    if is_first():
        print("\n".join([*table(runs, EXACT, quantity), "", *by_step(runs)]))
    if options.picture and is_first():
        draw(runs, EXACT, options.picture, quantity)
    for what, error in failed.items():
        raise RuntimeError(what) from error


def train_all(
    missing: list[tuple[str, int]], results: RunsFile, options: Options, config: RunConfig, begun: float
) -> dict[str, BaseException]:
    """Prepare the text while the variants compile, then train one run after another while there is time.

    Returns:
        What failed, and why: variants that do not compile, and runs; the others are trained.
    """
    if options.text:
        config = replace(config, data=replace(config.data, source=str(options.folder / "text.jsonl")))
    RunSetup(config).check()
    names = list(dict.fromkeys([EXACT, *(name for name, _ in missing)]))
    spawn = multiprocessing.get_context("spawn")  # a fork would share JAX's threads
    # The processes of a job tune kernels together, so that all must compile in the same order.
    workers = None if jax.process_count() == 1 else 1
    with ProcessPoolExecutor(1, spawn) as process, ThreadPoolExecutor(workers) as threads:
        wanted = (config.data, options.folder, options.text, options.kinds)
        text = process.submit(prepare_text, *wanted) if is_first() else None
        trainees = {name: Trainee(with_variant(config, name), threads) for name in names}
        described = run_on_process_zero(lambda: text and text.result())
        data = open_dataset(config.data, options.folder / "tokens")
        results.set_data(described, data)
        say(begun, data.describe())
    # All is compiled here: beside training, either would slow the other.
    broken = {name: error for name, trainee in trainees.items() if (error := trainee.error())}
    say(begun, f"compiled {', '.join(name for name in trainees if name not in broken)}")
    base = Base.of(options.init_from, trainees[EXACT]) if options.init_from else None
    results.check_base(None if base is None else base.described, options.seeds)
    failed = {f"{name} does not compile": error for name, error in broken.items()}
    longest = 0.0
    for name, seed in missing:
        now = time.monotonic()
        late = bool(options.minutes) and now + longest > begun + 60 * options.minutes
        if run_on_process_zero(lambda late=late: late):
            break
        if not {name, EXACT}.isdisjoint(broken):
            continue
        tuned = results.content["runs"] if options.tuned and seed != options.seeds[0] else []
        if tuned and name not in best_rates(tuned, options.seeds[0]).values():
            continue
        try:
            results.add(train(name, trainees[name], seed, data, trainees[EXACT], base))
        except Exception as error:  # whatever it is, other runs may train
            failed[f"{name}, seed {seed}, failed"] = error
            say(begun, f"{name}, seed {seed}: {error}")
        longest = max(longest, time.monotonic() - now)
    return failed


def best_rates(runs: Sequence[Run], seed: int) -> dict[str, str]:
    """By the names of variants without learning rates, those with the rate that ended best with a seed."""
    ordered = sorted((run for run in runs if run["seed"] == seed), key=lambda run: -run["loss"])
    return {run["variant"].partition("@")[0]: run["variant"] for run in ordered}


def with_best_rates(runs: Sequence[Run], seed: int) -> list[Run]:
    """The runs of ``best_rates``, under the names of variants without learning rates."""
    best = best_rates(runs, seed)
    names = {name: short for short, name in best.items()}
    return [{**run, "variant": names[run["variant"]]} for run in runs if run["variant"] in names]


def say(begun: float, what: str) -> None:
    """Print a line with the time since the start."""
    if is_first():
        print(f"{time.monotonic() - begun:5.0f} s  {what}", flush=True)


def with_variant(config: RunConfig, name: str) -> RunConfig:
    """The settings of a variant.

    Raises:
        ZeroError: there is none of that name.
    """
    kind, _, rate = name.partition("@")
    if kind not in VARIANTS:
        raise ZeroError(f"no variant {kind!r}: there are {', '.join(VARIANTS)}")
    try:
        own = {"optimizer": {"learning_rate": float(rate)}} if rate else {}
    except ValueError:
        raise ZeroError(f"variant {name!r}: {rate!r} is no learning rate") from None
    return with_settings(config, {"zero": VARIANTS[kind], **own})


def with_tokenizer_of(run: Path, config: RunConfig) -> RunConfig:
    """The settings with the tokenizer that another run trained, if it trained one."""
    trained = run / "data" / "tokenizer.json"
    return replace(config, data=replace(config.data, tokenizer=str(trained))) if trained.exists() else config


def prepare_text(
    settings: DataSection, folder: Path, megabytes: float, kinds: tuple[Kind, ...]
) -> dict[str, Any]:
    """Collect this machine's text if asked to, and write tokens; what is there already stays.

    Returns:
        What the text is, as `machine_text.collect` says; of text that was given, nothing.

    Raises:
        ZeroError: the folder has text of other kinds.
    """
    text, path = folder / "text.jsonl", folder / "text.json"
    folder.mkdir(parents=True, exist_ok=True)
    if megabytes and not path.exists():
        found = machine_text.collect(text, machine_text.default_roots(), megabytes, kinds)
        path.write_text(json.dumps(found, indent=1) + "\n")
    described = json.loads(path.read_text()) if megabytes else {}
    if other := described.get("kinds", {}).keys() - set(kinds):
        raise ZeroError(f"{folder} holds text of other kinds ({', '.join(other)}): name another --folder")
    prepare(settings, folder / "tokens")
    return described


if __name__ == "__main__":
    main()
