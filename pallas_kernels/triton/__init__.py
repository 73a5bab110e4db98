"""Triton kernels for CUDA devices, and their binding to JAX. They need jax-triton to be imported."""
