"""What strangers and settings may say: strict JSON and TOML, checksums, bounds of numbers, names of dtypes."""
