"""What the report of costs adds up."""

import time

import pytest
from durations import Cost, _Phases, _summary

TRACE, COMPILE = "/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration"


def test_a_function_traced_within_another_counts_once(monkeypatch: pytest.MonkeyPatch):
    phases = _Phases()
    # A trace from 10 to 20 contains one from 12 to 15 and a compile from 16 to 17.
    for event, end, duration in [(TRACE, 4, 3), (TRACE, 15, 3), (COMPILE, 17, 1), (TRACE, 20, 10)]:
        monkeypatch.setattr(time, "time", lambda end=end: end)
        phases.listen(event, duration)
    phases.listen("/jax/another", 5)
    assert phases.seconds == {"trace": 3 + 3 + (10 - 3 - 1), "lower": 0, "compile": 1}


def test_the_report_has_tests_folders_and_the_sum():
    costs = {
        "tests/a/b/test_x.py::test_one": Cost(user=3, system=1, children=2, wall=5, trace=1, compile=2),
        "tests/a/b/test_x.py::test_two": Cost(user=1, wall=1),
        "tests/test_y.py::test_three": Cost(user=9, wall=9),
    }
    lines = list(_summary(costs))
    assert [line.split()[-1] for line in lines[1:4]] == list(costs)[2:] + list(costs)[:2]
    rows = {tuple(line.split()[7:]): [float(x) for x in line.split()[:7]] for line in lines[5:]}
    assert rows["tests/a",] == [5, 2, 6, 1, 0, 2, 3]
    assert rows["all", "3", "tests"][0] == 14
