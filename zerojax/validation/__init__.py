"""Strict reading of what others wrote: JSON, TOML, checksums, bounds of numbers, names of dtypes."""
