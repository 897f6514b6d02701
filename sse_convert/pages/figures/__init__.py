"""Figures of a run, drawn once and shown twice: as SVG in pages, as PNG in model cards."""
