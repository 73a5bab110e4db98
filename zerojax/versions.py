"""Versions of zerojax and of what it runs on."""

from importlib.metadata import PackageNotFoundError, version

VERSION = "0.1.0"
"""The version of zerojax, which need not be installed; pyproject.toml takes it from here."""


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed, or is a source tree on the path."""
    if package == "zerojax":
        return VERSION
    try:
        return version(package)
    except PackageNotFoundError:
        return None
