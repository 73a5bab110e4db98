"""Which checkpoints of a run to keep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerojax.run.checkpoints.manifest import Manifest
from zerojax.validation.arguments import suggests


@suggests
@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep: the newest two, and the ones that any of these rules keeps.

    Two, because the newest may hold broken weights, which only the next step shows. Saving it proved that the
    weights before it were good. Checkpoints that hold a run's frozen weights or its reference are kept as
    well.

    Orbax's own policies measure time by the wall clock, and know nothing of frozen weights.

    Attributes:
        newest: keep this many of the newest, at least two; None keeps all.
        every: keep checkpoints at multiples of this many steps; 0 for none.
        best: keep this many with the lowest validation loss, among checkpoints saved at a step that measured
            it.
        minutes: keep checkpoints from the last ``minutes`` of training; time between runs does not count.
    """

    newest: int | None = None
    every: int = 0
    best: int = 0
    minutes: float = 0.0

    def surplus(self, manifests: Sequence[Manifest]) -> list[int]:
        """The steps of the checkpoints that no rule keeps.

        Args:
            manifests: the checkpoints' manifests, oldest first; at least one.
        """
        if self.newest is None:
            return []
        steps = [manifest.step for manifest in manifests]
        newest = manifests[-1].record
        kept = {*steps[-max(2, self.newest) :], *_lowest(manifests, self.best)}
        kept |= {step for step in steps if f"checkpoints/{step}" in newest.bases}
        if self.every:
            kept |= {step for step in steps if step % self.every == 0}
        if self.minutes:
            since = newest.seconds - self.minutes * 60
            kept |= {manifest.step for manifest in manifests if manifest.record.seconds > since}
        return [step for step in steps if step not in kept]


def _lowest(manifests: Sequence[Manifest], count: int) -> list[int]:
    """The steps with the lowest validation loss; among equal losses the newest."""
    losses = [(m.record.metrics.get("validation_loss", math.nan), -m.step) for m in manifests]
    return [-step for _, step in sorted(found for found in losses if math.isfinite(found[0]))[:count]]
