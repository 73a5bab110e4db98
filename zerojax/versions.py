"""The versions of zerojax and of the packages that it runs on."""

from importlib.metadata import PackageNotFoundError, version

VERSION = "0.1.0"
"""The version of zerojax, which need not be installed; pyproject.toml takes it from here."""

JAX_TESTED = ("0.11", "0.12")
"""The versions of JAX that pass the tests, also the bounds of pyproject.toml; only 0.11 has run on GPUs."""


def installed(package: str) -> str | None:
    """The version of a package; None if it is not installed, or is only a source tree on the path."""
    if package == "zerojax":
        return VERSION
    try:
        return version(package)
    except PackageNotFoundError:
        return None
