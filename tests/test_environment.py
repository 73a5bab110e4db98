"""tests/helpers/environment.py: what the tests find, and what pytest refuses before it collects any."""

import subprocess
import sys

import pytest
from environment import ROOT, check_platforms


@pytest.mark.parametrize("platforms", ["", "cpu", "cuda,cpu"])
def test_platforms_with_cpus_are_accepted(monkeypatch: pytest.MonkeyPatch, platforms: str) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    check_platforms()


def test_pytest_names_the_platforms_that_the_tests_need(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    tests = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert tests is not None
    with pytest.raises(pytest.UsageError, match=r"Run JAX_PLATFORMS=cuda,cpu pytest -m gpu$"):
        tests.pytest_configure(pytestconfig)


WITHOUT = """
import sys
import pytest
sys.modules |= dict.fromkeys(("griffe", "jsonschema", "mkdocs"))
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_tests_are_collected_without_the_packages_for_docs_and_schema() -> None:
    command = [sys.executable, "-c", WITHOUT, "tests/docs", "tests/cli/test_schema.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "the extra zerojax[dev] is not installed" in done.stdout
