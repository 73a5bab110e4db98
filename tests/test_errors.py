"""Errors as people see them."""

import pytest

from zerojax.errors import (
    EXIT_FAILED,
    EXIT_WRONG_USE,
    ConfigurationError,
    RunError,
    error_line,
    one_line,
    report,
)


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


def test_an_unexpected_error_is_described_by_itself_and_not_by_its_notes() -> None:
    """JAX adds "For simplicity, JAX has removed its internal frames" to its errors."""
    error = ValueError("cannot\nbe read: " + "x" * 10**4)
    error.add_note("For simplicity, frames were removed.")
    code, line = report(error)
    assert code == EXIT_FAILED
    assert line == error_line(error)
    assert line.startswith("ValueError: cannot be read: xx")
    assert line.endswith("xx")
    assert len(line) == 500
    assert error_line(KeyboardInterrupt()) == "KeyboardInterrupt"
