"""Errors as people see them."""

import pytest

from zerojax.errors import EXIT_FAILED, EXIT_WRONG_USE, ConfigurationError, RunError, one_line, report


def test_a_message_becomes_one_line_that_keeps_its_end() -> None:
    assert one_line("a\n\n  b\tc \n") == "a b c"
    assert one_line("a" * 500) == "a" * 500
    found = one_line("name: " + "x" * 10**6 + ": choose another")
    assert len(found) == 500
    assert found.startswith("name: xx")
    assert found.endswith("xx: choose another")
    assert " ... " in found


def test_a_report_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for error, code in (
        (ConfigurationError("a\nb" + "c" * 10**4), EXIT_WRONG_USE),
        (RunError("a\nb"), EXIT_FAILED),
    ):
        found, line = report(error)
        printed = capsys.readouterr().err
        assert (found, printed) == (code, f"zerojax: {line}\n")
        assert line.startswith("a b")
        assert len(line) <= 500
