"""Triton kernels for CUDA devices, and their binding to JAX. Import it only where jax-triton is."""
