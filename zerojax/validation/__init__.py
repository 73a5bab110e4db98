"""Validation of settings and untrusted files: strict JSON and TOML, checksums, bounds, names of dtypes."""
