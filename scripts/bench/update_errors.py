#!/usr/bin/env python3
"""What wire formats do to one update of Adam: how far off it is, and how much less it gets done.

    scripts/bench/update_errors.py gpt-tiny --text 0 --mesh.local 1

Chance moves the loss at the end of a run further than a format does (convergence.py). What a format costs is
seen in a single update. A model is trained exactly for train.steps; then, at those weights, the gradients of
the same batches travel as each variant has it, and Adam's moments are made of them. Of the blocks' matrices a
table says

- gradient: |g' - g| / |g|, g the exact gradient, over all batches;
- bias: <g' - g, g> / |g|^2 of the mean gradients;
- update: |u' - u| / |u|, u what Adam makes of the exact gradients;
- length: |u'| / |u| - 1;
- progress: <u', h> / <u, h> - 1, h the mean gradient of other batches: how much less the loss falls for a
  small step.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
from convergence import EXACT, VARIANTS, moved, prepare_text, with_variant

import zerojax
from zerojax import ZeroError, cli
from zerojax.cli import on_config
from zerojax.cli.cluster import emulate_devices
from zerojax.data import Batch, open_dataset
from zerojax.parts import abstract_state, check_settings, initial_state, make_batches
from zerojax.paths import from_tree
from zerojax.state import begin_with
from zerojax.step import gradients

LEFT_OUT = ("delta-nearest-feedback",)  # what a step lost is in the next one's gradient
HEADS = "| variant | gradient | bias | update | length | progress |\n|---|---|---|---|---|---|"
B1, B2, EPS = 0.9, 0.95, 1e-8

Gradient = list[jax.Array]
"""Of the blocks' matrices, fp32, laid out as the exact run has them."""


@dataclass(frozen=True)
class Options(on_config.Options):
    """Measure what formats do to one update of Adam; each setting of the config can be overridden.

    Attributes:
        variants: Which, as of convergence.py.
        history: Batches that the update is made of.
        held_out: Batches that it is judged by.
        text: Megabytes of this machine's text to train on; 0 reads data.source as it is.
        folder: Where text and tokens are kept.
    """

    variants: tuple[str, ...] = tuple(name for name in VARIANTS if name not in (EXACT, *LEFT_OUT))
    history: int = 40
    held_out: int = 40
    text: float = 300
    folder: Path = Path("build/convergence")


class Moments(NamedTuple):
    """What is kept of the gradients so far.

    Attributes:
        first, second: Adam's.
        total: their sum.
        off: the square of their distance from the exact ones, summed.
        size: the square of their length, summed.
    """

    first: Gradient
    second: Gradient
    total: Gradient
    off: jax.Array
    size: jax.Array

    @classmethod
    def like(cls, gradient: Gradient) -> Self:
        """Before the first gradient."""
        zeros = [jnp.zeros_like(x) for x in gradient]
        return cls(zeros, zeros, zeros, jnp.float32(0), jnp.float32(0))

    @jax.jit
    def after(self, gradient: Gradient, exact: Gradient) -> "Moments":
        """With one more."""
        return Moments(
            [B1 * m + (1 - B1) * g for m, g in zip(self.first, gradient, strict=True)],
            [B2 * v + (1 - B2) * g**2 for v, g in zip(self.second, gradient, strict=True)],
            [t + g for t, g in zip(self.total, gradient, strict=True)],
            self.off + square(minus(gradient, exact)),
            self.size + square(gradient),
        )

    def update(self, steps: int) -> Gradient:
        """Adam's direction."""
        return [
            m / (1 - B1**steps) / (jnp.sqrt(v / (1 - B2**steps)) + EPS)
            for m, v in zip(self.first, self.second, strict=True)
        ]


def main() -> None:
    """Train, measure, print a row for each variant."""
    try:
        run(on_config.parse(Options, "update_errors", sys.argv[1:]))
    except ZeroError as error:
        raise SystemExit(cli.report(error)[0]) from error


def run(options: Options) -> None:
    """Do what the options ask for.

    Raises:
        ZeroError: a variant that is not there, or settings that contradict each other.
    """
    config = with_variant(options.settings, EXACT)
    settings = {name: with_variant(config, name) for name in options.variants}
    emulate_devices(config.mesh)
    check_settings(config)
    config, _ = prepare_text(config, options.folder, options.text)
    batches, _ = make_batches(config, open_dataset(config.data, options.folder / "tokens"))
    state = initial_state(config)
    for _ in range(config.train.steps):
        state, _ = zerojax.train_step(state, next(batches))
    others = {}
    for name, own in settings.items():
        other = abstract_state(own)
        others[name] = begin_with(other, moved(state.params, state, other), config.train.seed)
    moments: dict[str, Moments] = {}
    for step in range(options.history):
        batch = next(batches)
        exact = arrived(state, state, batch, step)
        found = {EXACT: exact} | {name: arrived(other, state, batch, step) for name, other in others.items()}
        for name, gradient in found.items():
            moments[name] = (moments.get(name) or Moments.like(exact)).after(gradient, exact)
    ahead = [jnp.zeros_like(x) for x in moments[EXACT].total]
    for step in range(options.held_out):
        more = arrived(state, state, next(batches), step)
        ahead = [total + x for total, x in zip(ahead, more, strict=True)]
    batches.close()
    print(f"after {config.train.steps} exact steps:\n\n{HEADS}")
    for name in others:
        print(row(name, moments[name], moments[EXACT], ahead, options.history), flush=True)


def arrived(state: zerojax.TrainState, exact: zerojax.TrainState, batch: Batch, step: int) -> Gradient:
    """A batch's gradient at its owners; the step salts stochastic rounding."""
    found = gradients(state.replace(step=jnp.int32(step)), batch)
    stored = from_tree(moved(found, state, exact))
    return [stored[leaf.path] for leaf in exact.program.leaves if leaf.layers and len(leaf.shape) > 1]


def row(name: str, got: Moments, exact: Moments, ahead: Gradient, steps: int) -> str:
    """A variant's line of the table."""
    update, right = got.update(steps), exact.update(steps)
    cells = (
        f"{float(got.off / exact.size) ** 0.5:.2%}",
        f"{float(dot(minus(got.total, exact.total), exact.total) / square(exact.total)):+.2%}",
        f"{float(square(minus(update, right)) / square(right)) ** 0.5:.2%}",
        f"{float(square(update) / square(right)) ** 0.5 - 1:+.2%}",
        f"{float(dot(update, ahead) / dot(right, ahead)) - 1:+.2%}",
    )
    return f"| {name} | {' | '.join(cells)} |"


def minus(a: Gradient, b: Gradient) -> Gradient:
    """The difference, leaf by leaf."""
    return [x - y for x, y in zip(a, b, strict=True)]


def dot(a: Gradient, b: Gradient) -> jax.Array:
    """The inner product over all leaves."""
    return jnp.stack([jnp.sum(x * y) for x, y in zip(a, b, strict=True)]).sum()


def square(a: Gradient) -> jax.Array:
    """The square of the length."""
    return dot(a, a)


if __name__ == "__main__":
    main()
