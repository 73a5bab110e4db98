"""Clusters that are emulated on one machine."""
