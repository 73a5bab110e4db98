"""The process that ``zerojax.testing.emulated_cluster.measure_bytes`` runs on each node.

python -m zerojax.testing.emulated_cluster.worker MODULE:FUNCTION JSON_ARGUMENTS FOLDER
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import multihost_utils

from zerojax.multihost import distributed
from zerojax.testing.emulated_cluster.network import link_bytes


def main(target: str, arguments: str, folder: str) -> None:
    """Prepare the measured part, run it between two readings of the counters, and write the result."""
    with distributed.joined():
        _measure(target, arguments, folder)


def _measure(target: str, arguments: str, folder: str) -> None:
    module, _, name = target.partition(":")
    prepare: Callable[..., Callable[[], Any]] = getattr(importlib.import_module(module), name)
    piece = prepare(**json.loads(arguments))
    # Barriers before and after; each moves a few hundred bytes.
    multihost_utils.sync_global_devices("before")
    before = link_bytes()
    result = piece()
    multihost_utils.sync_global_devices("after")
    link = link_bytes() - before
    report = {"sent": link.sent, "received": link.received, "result": result}
    (Path(folder) / f"{jax.process_index()}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
