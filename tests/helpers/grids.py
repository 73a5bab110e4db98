"""Grids of cases, of which some run always and the others before a release (CONTRIBUTING.md)."""

from collections.abc import Iterable
from typing import Any

import pytest


def grid(cases: Iterable[Any], *always: Any) -> list[Any]:
    """All cases for ``parametrize``, tuples if there are several arguments; slow tests but for ``always``."""
    every = list(cases)
    assert all(case in every for case in always)
    return [case if case in always else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
