"""Emulation of clusters on one machine."""
