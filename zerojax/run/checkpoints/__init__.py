"""Checkpoints: natural arrays by Orbax, sealed, on any mesh.

`RUN/checkpoints/STEP/` holds one folder per kind of array ("params", "optimizer", ...), so that sampling
reads the parameters alone, and the seal. docs/checkpoints.md says what a user may rely on.
"""

from zerojax.run.checkpoints.clock import TrainingClock
from zerojax.run.checkpoints.log_filter import quiet_orbax
from zerojax.run.checkpoints.manifest import DamagedError, Record, Seal, read_seal, verify
from zerojax.run.checkpoints.restore import restore, restore_weights
from zerojax.run.checkpoints.resume import Resumed, resume
from zerojax.run.checkpoints.retention import Retention
from zerojax.run.checkpoints.select import Choice, damage_line, find, newest_sound, sealed, set_damaged_aside
from zerojax.run.checkpoints.store import Checkpoints
from zerojax.run.checkpoints.transfer import reserve_host_memory

quiet_orbax()

__all__ = [
    "Checkpoints",
    "Choice",
    "DamagedError",
    "Record",
    "Resumed",
    "Retention",
    "Seal",
    "TrainingClock",
    "damage_line",
    "find",
    "newest_sound",
    "read_seal",
    "reserve_host_memory",
    "restore",
    "restore_weights",
    "resume",
    "sealed",
    "set_damaged_aside",
    "verify",
]
