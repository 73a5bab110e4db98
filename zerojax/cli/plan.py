"""`zerojax plan CONFIG`: what a run will hold and send."""

import json

from zerojax.cli.untrained import abstract_run, parse

DESCRIPTION = """Show what a run of a config will hold and send: units, wire formats, bytes, memory by kind.

Reckoned from formulas in a moment; none of the cluster's devices has to be there."""


def run(arguments: list[str]) -> None:
    """Reckon and print."""
    options = parse("plan", DESCRIPTION, arguments)
    state, _ = abstract_run(options.settings)

    from zerojax.plan import plan_state

    plan = plan_state(state)
    print(json.dumps(plan.to_dict(), indent=2) if options.json else plan)
