"""Figures of a run, as PNG for its model card."""
