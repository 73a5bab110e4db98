"""Rates of links."""

import pytest

from zerojax.validation.rates import bytes_per_second


@pytest.mark.parametrize(
    ("rate", "expected"), [("10gbit", 1.25e9), ("2.5 Gbit", 312.5e6), ("400mbit", 5e7), ("8kbit", 1e3)]
)
def test_rates(rate, expected):
    assert bytes_per_second(rate) == expected


@pytest.mark.parametrize("rate", ["fast", "10gbps", "1.2.3gbit", "", "0gbit", "-1gbit"])
def test_what_is_not_a_rate(rate):
    with pytest.raises(ValueError, match="is not a rate"):
        bytes_per_second(rate)
