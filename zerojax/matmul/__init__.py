"""Finds the matmuls that read a weight, and replaces them: by fp8 products, or with low-rank adapters."""
