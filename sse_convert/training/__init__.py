"""Training: text to rows, the three losses, the loop, checkpoints, and the pipeline that runs a whole recipe."""
