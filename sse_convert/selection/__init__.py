"""Which layers to keep as softmax attention: a probe, stand-ins swapped into one model, and one file per method."""
