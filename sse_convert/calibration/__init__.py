"""Initial values of new tensors, from what the teacher's attention does on a few rows."""
