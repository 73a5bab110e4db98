"""``zerojax comm CONFIG``: the communication of a training step."""

import json
from dataclasses import dataclass

from zerojax.analysis.comm_report import comm_report
from zerojax.cli import on_config
from zerojax.cli.savings import Savings
from zerojax.cli.trained import abstract_run


@dataclass(frozen=True)
class Options(on_config.Options):
    """Count the bytes that a training step of a config sends, and name options that would send less.

    Trains nothing, and needs none of the cluster's devices.

    Attributes:
        json: Print JSON instead of tables.
    """

    json: bool = False


def run(arguments: list[str]) -> None:
    """Trace the step and print its collectives."""
    options, settings = on_config.parse(Options, "comm", arguments)
    state, batch = abstract_run(settings)
    report = comm_report(state, batch)
    savings = Savings(settings, state.spec, report)
    if options.json:
        print(json.dumps({**report.to_dict(), "savings": savings.to_dict()}, indent=2))
    else:
        print(report, savings.sent_line(), sep="\n")
