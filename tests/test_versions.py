"""zerojax.versions: the tested versions of JAX, as pyproject.toml and `zerojax doctor` have them."""

import tomllib

import jax
import pytest
from environment import ROOT
from packaging.requirements import Requirement

from zerojax.cli import doctor
from zerojax.versions import JAX_TESTED


def test_pyproject_accepts_the_tested_versions_of_jax_and_no_later_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = [
        one.specifier for one in map(Requirement, project["dependencies"]) if one.name in ("jax", "jaxlib")
    ]
    accepted = [f"0.{minor}" for minor in range(30) if all(f"0.{minor}.1" in one for one in bounds)]
    assert (len(bounds), tuple(accepted)) == (2, JAX_TESTED)


@pytest.mark.parametrize(
    ("version", "noted"), [("0.11.2", False), ("0.12.0.1", False), ("0.13.0", True), ("0.1.75", True)]
)
def test_doctor_notes_a_jax_that_is_not_tested(
    monkeypatch: pytest.MonkeyPatch, version: str, noted: bool
) -> None:
    monkeypatch.setattr(jax, "__version__", version)
    notes = [text for name, text in doctor._versions() if name == "note"]
    assert notes == ["zerojax is tested with JAX 0.11 and 0.12"] * noted
