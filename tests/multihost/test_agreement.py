"""Agreement between processes about saves and stops."""

import jax
import pytest

import zerojax
from zerojax.multihost.agreement import Agreement, Requests


@pytest.mark.parametrize(
    ("every", "wanted"),
    [(1, [False, False, True, True, True, True, True]), (3, [False] * 3 + [True, False, False, True])],
)
def test_requests_are_known_a_step_after_the_devices_reduced_them(
    monkeypatch: pytest.MonkeyPatch, every: int, wanted: list[bool]
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    agreement = Agreement(zerojax.make_mesh(1, 2), every)
    told = []
    for step in range(1, 8):
        agreement.put(Requests(stop=step >= 2))
        told.append(agreement.get().stop)
    assert told == wanted
