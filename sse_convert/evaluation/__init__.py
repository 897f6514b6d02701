"""Measurements: held-out loss by position, needle retrieval, speed and cache size, teacher beside student."""
