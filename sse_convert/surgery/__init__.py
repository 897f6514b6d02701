"""Everything that reads and writes checkpoints without training: plan, convert, calibrate, verify, inspect."""
