"""Jobs that a test joins and leaves again at its end."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from zerojax.multihost import peers

_joined = []


@pytest.fixture
def leave_jobs():
    yield
    with ThreadPoolExecutor(4) as pool:  # closing without leaving would end the others, and pytest with them
        list(pool.map(lambda peers: peers.leave(), _joined))
    while _joined:
        _joined.pop().close()


def join(port, rank, size, facts=None, token="", join_timeout=10.0):
    with tempfile.TemporaryDirectory() as folder:
        place = peers.Place("127.0.0.1", port, "127.0.0.1", rank, size, token, Path(folder))
        one = peers.Peers(place, facts or {}, join_timeout=join_timeout, peer_timeout=10.0)
    _joined.append(one)
    return one
