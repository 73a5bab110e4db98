"""Emulation of clusters on one machine."""

from zerojax.testing import emulated_cluster as cluster

__all__ = ["cluster"]
