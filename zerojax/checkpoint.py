"""Checkpoints: natural arrays by Orbax, written while training goes on, complete or not there at all.

`RUN/checkpoints/STEP/` holds one part per kind of array ("params", "optimizer", ...), so that sampling
reads the parameters alone, and a JSON record: the data position and what else the trainer counts.
"""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import traverse_util
from orbax.checkpoint import v1 as ocp

from zerojax.errors import ZeroError
from zerojax.natural import abstract_natural, from_natural, to_natural
from zerojax.state import TrainState

# What a program can make afresh when a checkpoint has none that fits it.
_OPTIONAL = ("secondary", "residual")


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, *, keep: int | None = None) -> None:
        """Look at what is there.

        Args:
            folder: of the checkpoints; made when the first is saved.
            keep: how many to keep, the newest; None keeps all.
        """
        policies = ocp.training.preservation_policies
        self._folder = folder
        self._checkpointer = ocp.training.Checkpointer(
            str(folder.absolute()),
            preservation_policy=policies.PreserveAll() if keep is None else policies.LatestN(keep),  # type: ignore[arg-type]  # Orbax's own policies do not match its protocol
            cleanup_tmp_directories=True,
        )

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish what is being written."""
        self.close()

    @property
    def latest(self) -> int | None:
        """The newest step that is complete, or None."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, step: int, state: TrainState, record: Mapping[str, Any]) -> None:
        """Begin to save; returns when the arrays are copied off the devices, and writes on by itself.

        Args:
            step: names the checkpoint.
            state: what to save; may be donated as soon as this returns.
            record: JSON data to go with it.
        """
        self._checkpointer.save_checkpointables_async(
            step, to_natural(state), force=True, custom_metadata=dict(record)
        )

    def record(self, step: int) -> dict[str, Any]:
        """The JSON data that was saved with a step."""
        return dict(self._checkpointer.checkpointables_metadata(step).custom_metadata or {})  # type: ignore[arg-type]  # a dict, since `save` gave one

    def restore(self, step: int, state: TrainState) -> TrainState:
        """Read a checkpoint into a state's program, whatever mesh, stage or wire format wrote it.

        Args:
            step: which.
            state: of the program that shall go on, filled or abstract; its values are not used.

        Raises:
            ZeroError: the checkpoint is of another model or optimizer; names the first difference.
        """
        saved = self._checkpointer.checkpointables_metadata(step).metadata
        wanted = {
            kind: tree
            for kind, tree in abstract_natural(state).items()
            if kind not in _OPTIONAL or not _differences(tree, saved.get(kind))
        }
        for kind, tree in wanted.items():
            if differences := _differences(tree, saved.get(kind)):
                raise ZeroError(
                    f"{self._folder / str(step)} does not fit this run: {kind}: {'; '.join(differences[:3])}"
                )
        return from_natural(state, self._checkpointer.load_checkpointables(step, wanted))

    def wait(self) -> None:
        """Wait until what is being saved is complete."""
        self._checkpointer.wait()

    def close(self) -> None:
        """Wait, and end the writing threads."""
        self._checkpointer.close()


def _differences(wanted: Any, saved: Any) -> list[str]:
    """What in a saved part is not as it should be, by name."""
    if saved is None:
        return ["not saved"]
    have: dict[str, Any] = traverse_util.flatten_dict(saved, sep="/")
    want: dict[str, Any] = traverse_util.flatten_dict(wanted, sep="/")
    found = [f"{name} is missing" for name in want if name not in have]
    found += [f"{name} is unknown" for name in have if name not in want]
    return found + [
        f"{name} is {have[name].dtype}{list(have[name].shape)}, not {x.dtype}{list(x.shape)}"
        for name, x in want.items()
        if name in have
        and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        and (have[name].shape, have[name].dtype) != (x.shape, x.dtype)
    ]
