"""Values of all processes, without a mesh."""

import itertools
import json
from typing import Any

import jax
from jax._src import distributed  # JAX has no public way to its store of keys and values

from zerojax.errors import ConfigurationError

_FOREVER = 10 * 365 * 24 * 3600 * 1000
"""Milliseconds. If a process is lost, its peers end this one, or JAX's service ends the wait."""
_calls = itertools.count()


def gather_from_all(value: Any) -> list[Any]:
    """Gather a JSON-serializable value from each process, by rank; all processes call it together.

    The values pass through JAX's service in rank 0. Devices would compile a program for each length.

    Raises:
        ConfigurationError: the processes do not use JAX's service.
    """
    text = json.dumps(value)
    if (size := jax.process_count()) == 1:
        return [json.loads(text)]
    if (client := distributed.global_state.client) is None:
        raise ConfigurationError(
            f"{size} processes have no service in common: join them by zerojax.distributed.joined()"
        )
    number = next(_calls)
    place = f"zerojax/gather/{number}"
    client.key_value_set(f"{place}/{jax.process_index()}", text)
    if jax.process_index() == 0:
        texts = [client.blocking_key_value_get(f"{place}/{rank}", _FOREVER) for rank in range(size)]
        client.key_value_set(f"{place}/all", f"[{','.join(texts)}]")
        # All processes have read the values before, because they have sent their next.
        client.key_value_delete(f"zerojax/gather/{number - 1}")
    return json.loads(client.blocking_key_value_get(f"{place}/all", _FOREVER))
