"""``zerojax schema``: prints the JSON schema of configs, with which editors complete and check them."""

import json

from zerojax.errors import ConfigurationError
from zerojax.run.config.schema import config_schema


def run(arguments: list[str]) -> None:
    """Print the schema."""
    if arguments:
        raise ConfigurationError(
            "zerojax schema takes no arguments; write it to a file: > zerojax.schema.json"
        )
    print(json.dumps(config_schema(), indent=1))
