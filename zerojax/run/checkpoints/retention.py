"""Which checkpoints to delete once a newer one is complete."""

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
    """Which checkpoints to keep: the newest two, and those that any of these rules keeps.

    Checkpoints that hold a run's frozen weights or its reference stay. Two, because the newest may hold
    broken weights, which shows only in the step after it; that it was saved proves the weights of the one
    before.

    Attributes:
        newest: keep this many of the newest, at least two; None keeps all.
        every: keep those at multiples of this many steps; 0 for none.
        best: keep this many with the lowest validation loss, of those saved at a step that measured it.
        minutes: keep those of the last ``minutes`` of training, time between runs not counted.
    """

    newest: int | None = None
    every: int = 0
    best: int = 0
    minutes: float = 0.0

    def surplus(self, manifests: Sequence[Manifest]) -> list[int]:
        """The steps of the checkpoints that no rule keeps.

        Args:
            manifests: of the checkpoints, oldest first; at least one. The last is that of the newest.
        """
        infos = [_Info.of(manifest) for manifest in manifests]
        now = manifests[-1].record.seconds
        bases = manifests[-1].record.bases
        wanted = [
            [f"checkpoints/{manifest.step}" in bases for manifest in manifests],
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
    """A checkpoint as Orbax's policies see it; their "time" is seconds of training."""

    step: int
    time: datetime
    metrics: dict[str, float] | None

    @classmethod
    def of(cls, manifest: Manifest) -> "_Info":
        loss = manifest.record.metrics.get("validation_loss", math.nan)
        metrics = {"validation_loss": loss} if math.isfinite(loss) else None
        return cls(manifest.step, datetime.fromtimestamp(manifest.record.seconds, UTC), metrics)
