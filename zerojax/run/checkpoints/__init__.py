"""Checkpoints: unsharded arrays written by Orbax, with a manifest, restored on any mesh.

``RUN/checkpoints/STEP/`` holds the manifest and one folder for each kind of array ("params", "optimizer",
...), so sampling can read the parameters alone. docs/checkpoints.md says what a user may rely on.
"""

import logging

from zerojax.run.checkpoints.manifest import Beside as Beside
from zerojax.run.checkpoints.manifest import DamagedError as DamagedError
from zerojax.run.checkpoints.manifest import Manifest as Manifest
from zerojax.run.checkpoints.manifest import Record as Record
from zerojax.run.checkpoints.manifest import Retention as Retention
from zerojax.run.checkpoints.manifest import read_manifest as read_manifest
from zerojax.run.checkpoints.manifest import read_manifests as read_manifests
from zerojax.run.checkpoints.manifest import verify as verify
from zerojax.run.checkpoints.restore import Resumed as Resumed
from zerojax.run.checkpoints.restore import restore as restore
from zerojax.run.checkpoints.restore import restore_base as restore_base
from zerojax.run.checkpoints.restore import restore_weights as restore_weights
from zerojax.run.checkpoints.restore import resume as resume
from zerojax.run.checkpoints.run_copy import RunCopy as RunCopy
from zerojax.run.checkpoints.run_copy import check_copy as check_copy
from zerojax.run.checkpoints.select import Choice as Choice
from zerojax.run.checkpoints.select import damage_line as damage_line
from zerojax.run.checkpoints.select import find as find
from zerojax.run.checkpoints.select import newest_valid as newest_valid
from zerojax.run.checkpoints.snapshots import Snapshot as Snapshot
from zerojax.run.checkpoints.snapshots import Snapshots as Snapshots
from zerojax.run.checkpoints.store import Checkpoints as Checkpoints
from zerojax.run.checkpoints.store import TrainingClock as TrainingClock
from zerojax.run.checkpoints.store import reserve_for_saves as reserve_for_saves

# Orbax logs pages about errors that zerojax reports in one line. Other libraries that log to "absl" are kept.
logging.getLogger("absl").addFilter(lambda record: "/orbax/checkpoint/" not in record.pathname)
