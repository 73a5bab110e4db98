"""`zerojax comm CONFIG`: what a training step sends."""

import json

from zerojax.cli.untrained import abstract_run, parse

DESCRIPTION = """Count what a training step of a config sends: every collective, within nodes and between.

Nothing is trained, and none of the cluster's devices has to be there."""


def run(arguments: list[str]) -> None:
    """Trace the step and print what it sends."""
    options = parse("comm", DESCRIPTION, arguments)
    state, batch = abstract_run(options.settings)

    from zerojax.wire import comm_report

    report = comm_report(state, batch)
    print(json.dumps(report.to_dict(), indent=2) if options.json else report)
