"""A rollout and its updates with inference engines: seconds on policy, and one rollout ahead."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from zerojax.analysis.plan.cluster import NETWORK_EFFICIENCY
from zerojax.analysis.plan.outlook import Outlook
from zerojax.errors import ConfigurationError
from zerojax.formatting import size

_SERVED = 2
"""Bytes of a weight in an engine: bf16."""


@dataclass(frozen=True)
class Engines:
    """The engines of a run.

    Attributes:
        count: engines, each with a whole model; every engine's host gets all weights from the run.
        tokens: new tokens per second, of all engines together.
        bandwidth: bytes per second of the link of an engine's host.
        changed: share of the served weights that a rollout's updates change, above 0 and at most 1.
    """

    count: int
    tokens: float
    bandwidth: float
    changed: float = 0.01

    def __post_init__(self) -> None:
        """Refuse rates that are not positive, and a share outside (0, 1]."""
        if not self.tokens > 0:
            raise ConfigurationError(f"--engine-tokens {self.tokens}: tokens per second must be above 0")
        if not self.bandwidth > 0:
            raise ConfigurationError(
                "the rate of the engines' link is missing: give --engine-bandwidth, such as 10gbit"
            )
        if not 0 < self.changed <= 1:
            raise ConfigurationError(f"--changed {self.changed}: a share is above 0 and at most 1")

    def patch_bytes(self, weights: int) -> float:
        """Bytes of the patches of a model.

        A gap takes log2(1 / share) + 1.5 bits as a Rice code, a value about 2 bits (docs/engines.md). Patches
        are never larger than the weights.
        """
        each = (math.log2(1 / self.changed) + 3.5) / 8
        return weights * min(self.changed * each, _SERVED)


@dataclass(frozen=True)
class EngineStep:
    """Predicted seconds of a rollout and its updates.

    Attributes:
        rollout: generation, if every completion has the most tokens.
        scoring: the run's own log-probabilities of all tokens; rewards take no time here.
        training: the updates.
        full_bytes: all weights, to each engine.
        sparse_bytes: their patches, to each engine.
        full: seconds to send all weights to all engines.
        sparse: seconds to send the patches.
    """

    rollout: float
    scoring: float
    training: float
    full_bytes: float
    sparse_bytes: float
    full: float
    sparse: float

    def on_policy(self, sending: float) -> float:
        """Seconds if everything waits for everything else."""
        return sending + self.rollout + self.scoring + self.training

    def ahead(self, sending: float) -> float:
        """Seconds if engines generate beside the training, with weights that are one rollout old."""
        return max(sending + self.rollout, self.scoring + self.training)

    def to_dict(self) -> dict[str, Any]:
        """Bytes and seconds, for JSON."""
        totals = {
            f"{name}_{what}": total(sending)
            for name, total in (("on_policy", self.on_policy), ("ahead", self.ahead))
            for what, sending in (("full", self.full), ("sparse", self.sparse))
        }
        return asdict(self) | totals

    def __str__(self) -> str:
        lines = [
            f"A rollout with engines: generate {self.rollout:.3g} s, log-probabilities {self.scoring:.3g} s, "
            f"update {self.training:.3g} s."
        ]
        for name, count, sending in (
            ("all weights", self.full_bytes, self.full),
            ("patches", self.sparse_bytes, self.sparse),
        ):
            lines.append(
                f"- {name}: {size(count)} to each engine in {sending:.3g} s; together "
                f"{self.on_policy(sending):.3g} s on policy, {self.ahead(sending):.3g} s one rollout ahead"
            )
        return "\n".join(lines)


def foresee_engines(outlook: Outlook, engines: Engines, *, rows: int, epochs: int, tokens: int) -> EngineStep:
    """Predict a rollout of engines and its updates.

    Args:
        outlook: of the run's optimizer step.
        engines: the engines.
        rows: completions of a rollout.
        epochs: how often the updates read each of them.
        tokens: the most new tokens of a completion.
    """
    own, cluster = outlook.own, outlook.cluster
    weights = sum(leaf.count for leaf in own.spec.weights)
    row_seconds = own.time.seconds / outlook.batch
    forward = own.work.forward / (own.work.forward + own.work.backward)
    full, sparse = _SERVED * weights, engines.patch_bytes(weights)
    # All nodes send; an engine's host has one link.
    rate = min(engines.bandwidth, cluster.nodes * (cluster.bandwidth or math.inf) / engines.count)
    rate *= NETWORK_EFFICIENCY
    return EngineStep(
        rollout=rows * tokens / engines.tokens,
        scoring=rows * forward * row_seconds,
        training=rows * epochs * row_seconds,
        full_bytes=full,
        sparse_bytes=sparse,
        full=full / rate,
        sparse=sparse / rate,
    )
