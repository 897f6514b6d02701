"""Converted models in serving engines. What computes needs torch alone; each engine's own code is in its folder."""
