"""Generating text: greedy or sampled, on a GPU as CUDA graphs over caches of fixed size."""
