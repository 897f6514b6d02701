"""Triton kernels for generation, beside the operator: attention over a cache, norms, products of one row."""
