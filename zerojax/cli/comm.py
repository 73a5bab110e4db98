"""`zerojax comm CONFIG`: what a training step sends."""

import json
from dataclasses import dataclass

from zerojax.analysis.comm_report import comm_report
from zerojax.cli import on_config
from zerojax.cli.savings import Savings
from zerojax.cli.untrained import abstract_run


@dataclass(frozen=True)
class Options(on_config.Options):
    """Count what a training step of a config sends, and say which option would send less.

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
    savings = Savings(options.settings, state.spec, report)
    if options.json:
        print(json.dumps({**report.to_dict(), "savings": savings.to_dict()}, indent=2))
    else:
        print(report, savings.sent_line(), sep="\n")
