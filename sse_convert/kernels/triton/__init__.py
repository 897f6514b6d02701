"""Triton kernels of the SSE operator: routing, forward, backward and decode."""
