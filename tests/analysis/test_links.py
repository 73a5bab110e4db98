"""The measurements and advice of doctor, on emulated devices."""

import re

import jax
import pytest

from zerojax import make_mesh
from zerojax.analysis import links

pytestmark = pytest.mark.alone


def test_each_axis_with_peers_is_measured():
    found = links.links_of(make_mesh(2, 2))
    for link in found.values():
        assert link is not None
        # Emulated devices copy memory: faster than any modem and slower than any cache.
        assert 1e6 < link.bytes_per_second < 1e12
        assert 0 < link.seconds < 10
    assert links.links_of(make_mesh(1, 2))["node"] is None
    assert links.links_of(make_mesh(2, 1))["local"] is None


def test_one_rate_a_process():
    (rate,) = links.measure_matmul()
    assert rate > 1e6
    assert jax.process_count() == 1


def test_tokens_to_hide():
    # 989 TFLOP/s of which half is reached, a node of 400 Gb/s: 3 x 2 P bytes take as long as 6 P x 9890.
    assert links.tokens_to_hide("zero3", 50e9, 989e12) == pytest.approx(9890)
    assert links.tokens_to_hide("zero++", 50e9, 989e12) == pytest.approx(9890 / 4)
    assert links.tokens_to_hide("delta", 50e9, 989e12) == pytest.approx(9890 / 6)


@pytest.mark.parametrize(
    ("gigabits", "preset", "every"),
    [(1600, "zero3", 0), (400, "zero++", 0), (100, "delta", 0), (75, "local", 16), (5, "local", 32)],
)
def test_the_slower_the_network_the_less_is_sent(gigabits, preset, every):
    link = links.Link(gigabits / 8 * 1e9 / 8, 1e-5)
    chosen, why = links.advise(link, 8, 989e12)
    assert chosen == preset
    assert "8,192" in why
    # At 5 Gb/s 131,867 tokens would hide delta: its bytes over 32 hide behind 8,192.
    assert re.findall(r"local updates with zero.every = (\d+)", why) == [str(every)] * (preset == "local")


def test_without_a_network_exact_is_free():
    assert links.advise(None, 8, 989e12)[0] == "zero3"
