"""Triton kernels for CUDA devices, and their binding to JAX; importable only with jax-triton installed."""
