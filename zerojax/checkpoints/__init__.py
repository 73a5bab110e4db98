"""Checkpoints: natural arrays by Orbax, sealed, on any mesh.

`RUN/checkpoints/STEP/` holds one folder per kind of array ("params", "optimizer", ...), so that sampling
reads the parameters alone, and the seal. docs/checkpoints.md says what a user may rely on.
"""

from zerojax.checkpoints.choose import Choice, damage_line, find, newest_sound, sealed, set_damaged_aside
from zerojax.checkpoints.clock import TrainingClock
from zerojax.checkpoints.quiet import quiet_orbax
from zerojax.checkpoints.restore import restore, restore_weights
from zerojax.checkpoints.resume import Resumed, resume
from zerojax.checkpoints.retention import Retention
from zerojax.checkpoints.seal import DamagedError, Record, Seal, read_seal, verify
from zerojax.checkpoints.store import Checkpoints
from zerojax.checkpoints.transfer import reserve_host_memory

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
