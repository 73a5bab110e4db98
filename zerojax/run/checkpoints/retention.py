"""Which checkpoints may go, once a newer one is sealed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from orbax.checkpoint import v1 as ocp

from zerojax.run.checkpoints.manifest import Manifest

_orbax = ocp.training.preservation_policies


@dataclass(frozen=True)
class Retention:
    """What is kept; a checkpoint stays when any of these wants it, and the newest two always do.

    The newest may have broken weights, which shows in the step after it only. That it could be saved shows
    that the weights of the one before are good.

    Attributes:
        newest: this many, and two at least; None keeps all.
        every: those at multiples of so many steps; 0 none.
        best: this many with the lowest validation loss, of those saved at a step that measured it.
        minutes: those of the last minutes of training. Time between the starts of a run does not count,
            and no clock that can be set does.
    """

    newest: int | None = None
    every: int = 0
    best: int = 0
    minutes: float = 0.0

    def surplus(self, manifests: Sequence[Manifest]) -> list[int]:
        """The steps of those that nothing keeps.

        Args:
            manifests: of all that are there, oldest first; at least one.
        """
        infos = [_Info.of(manifest) for manifest in manifests]
        now = manifests[-1].record.seconds
        wanted = [
            [
                self.minutes > 0 and now - manifest.record.seconds < self.minutes * 60
                for manifest in manifests
            ],
            *(
                policy.should_preserve(infos, context=_orbax.PreservationContext())
                for policy in self._policies()
            ),
        ]
        return [manifest.step for manifest, *keep in zip(manifests, *wanted, strict=True) if not any(keep)]

    def _policies(self) -> list[Any]:
        policies: list[Any] = [_orbax.LatestN(self.newest and max(2, self.newest))]
        if self.every:
            policies.append(_orbax.EveryNSteps(self.every))
        if self.best:
            best = _orbax.BestN(
                get_metric_fn=lambda metrics: metrics["validation_loss"],
                reverse=True,
                n=self.best,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(best)
        return policies


@dataclass(frozen=True)
class _Info:
    """A checkpoint as Orbax's policies look at it; their "time" is seconds of training here."""

    step: int
    time: datetime
    metrics: dict[str, float] | None

    @classmethod
    def of(cls, manifest: Manifest) -> "_Info":
        loss = manifest.record.metrics.get("validation_loss", math.nan)
        metrics = {"validation_loss": loss} if math.isfinite(loss) else None
        return cls(manifest.step, datetime.fromtimestamp(manifest.record.seconds, UTC), metrics)
