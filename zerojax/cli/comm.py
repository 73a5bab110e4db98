"""`zerojax comm CONFIG`: what a training step sends."""

import json
from dataclasses import dataclass

from zerojax.cli import on_config
from zerojax.cli.untrained import abstract_run
from zerojax.wire import comm_report


@dataclass(frozen=True)
class Options(on_config.Options):
    """Count what a training step of a config sends: every collective, within nodes and between.

    Nothing is trained, and none of the cluster's devices has to be there.

    Attributes:
        json: Print JSON instead of tables.
    """

    json: bool = False


def run(arguments: list[str]) -> None:
    """Trace the step and print what it sends."""
    options = on_config.parse(Options, "comm", arguments)
    state, batch = abstract_run(options.settings)
    report = comm_report(state, batch)
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
