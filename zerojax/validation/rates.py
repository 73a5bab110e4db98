"""Rates of links in words, such as 10gbit."""

import re

from zerojax.errors import ConfigurationError

_RATE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmg])bit", re.IGNORECASE)


def bytes_per_second(rate: str, option: str = "rate") -> int:
    """``"10gbit"`` -> 1250000000. Messages begin with ``option``.

    Raises:
        ConfigurationError: it is not a number with the unit kbit, mbit or gbit.
    """
    found = _RATE.fullmatch(rate.strip())
    if found is None or not 0 < float(found[1]) < 1e9:
        raise ConfigurationError(
            f"{option}: {rate!r} is not a rate: give one such as 10gbit, 2.5gbit or 400mbit"
        )
    return int(float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2].lower()] / 8)
