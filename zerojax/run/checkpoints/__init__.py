"""Checkpoints: unsharded arrays written by Orbax, with a manifest, restored on any mesh.

``RUN/checkpoints/STEP/`` holds one folder per kind of array ("params", "optimizer", ...), so that sampling
reads the parameters alone, and the manifest. docs/checkpoints.md says what a user may rely on.
"""

import logging

from zerojax.run.checkpoints.clock import TrainingClock
from zerojax.run.checkpoints.manifest import Beside, DamagedError, Manifest, Record, read_manifest, verify
from zerojax.run.checkpoints.restore import restore, restore_base, restore_weights
from zerojax.run.checkpoints.resume import Resumed, resume
from zerojax.run.checkpoints.retention import Retention
from zerojax.run.checkpoints.select import (
    Choice,
    damage_line,
    find,
    newest_valid,
    read_manifests,
    set_damaged_aside,
)
from zerojax.run.checkpoints.store import Checkpoints
from zerojax.run.checkpoints.transfer import reserve_for_saves

# Orbax's log fills pages with errors that zerojax raises and reports in one line. Other users of "absl" keep
# theirs.
logging.getLogger("absl").addFilter(lambda record: "/orbax/checkpoint/" not in record.pathname)

__all__ = [
    "Beside",
    "Checkpoints",
    "Choice",
    "DamagedError",
    "Manifest",
    "Record",
    "Resumed",
    "Retention",
    "TrainingClock",
    "damage_line",
    "find",
    "newest_valid",
    "read_manifest",
    "read_manifests",
    "reserve_for_saves",
    "restore",
    "restore_base",
    "restore_weights",
    "resume",
    "set_damaged_aside",
    "verify",
]
