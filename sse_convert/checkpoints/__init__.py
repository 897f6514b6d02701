"""Checkpoints on disk: opened by their headers, read tensor by tensor, written whole or not at all."""
