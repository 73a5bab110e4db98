"""Jobs that a test joins, and leaves at its end."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zerojax.multihost import peers

_joined = []


@pytest.fixture
def leave_jobs():
    yield
    with ThreadPoolExecutor(4) as pool:  # who hangs up without leaving ends the others, pytest with them
        list(pool.map(lambda met: met.leave(), _joined))
    while _joined:
        _joined.pop().close()


def join(port, rank, size, facts=None, token="", join_timeout=10.0):
    with tempfile.TemporaryDirectory() as folder:
        place = peers.Place("127.0.0.1", port, "127.0.0.1", rank, size, token, Path(folder))
        met = peers.join(place, facts or {}, join_timeout=join_timeout, peer_timeout=10.0)
    _joined.append(met)
    return met
