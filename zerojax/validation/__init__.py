"""What strangers and settings may say: strict JSON and TOML, checksums, bounds, names of dtypes."""
