"""Pallas kernels for Hopper and newer, through Pallas' Mosaic GPU backend, which needs jax alone."""
