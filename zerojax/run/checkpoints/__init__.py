"""Checkpoints: unsharded arrays written by Orbax, with a manifest, restored on any mesh.

``RUN/checkpoints/STEP/`` holds the manifest and one folder for each kind of array ("params", "optimizer",
...), so sampling can read the parameters alone. docs/checkpoints.md says what a user may rely on.
"""

import logging

from zerojax.run.checkpoints.manifest import (
    Beside,
    DamagedError,
    Manifest,
    Record,
    Retention,
    read_manifest,
    read_manifests,
    verify,
)
from zerojax.run.checkpoints.restore import Resumed, restore, restore_base, restore_weights, resume
from zerojax.run.checkpoints.run_copy import RunCopy, check_copy
from zerojax.run.checkpoints.select import (
    Choice,
    damage_line,
    find,
    newest_valid,
    set_damaged_aside,
)
from zerojax.run.checkpoints.snapshots import Snapshot, Snapshots
from zerojax.run.checkpoints.store import Checkpoints, TrainingClock, reserve_for_saves

# Orbax logs pages about errors that zerojax reports in one line. Other libraries that log to "absl" are kept.
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
    "RunCopy",
    "Snapshot",
    "Snapshots",
    "TrainingClock",
    "check_copy",
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
