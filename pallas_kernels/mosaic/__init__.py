"""Pallas kernels for Hopper and newer, through Pallas' Mosaic GPU backend. They need jax alone."""
