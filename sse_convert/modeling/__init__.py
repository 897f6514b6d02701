"""What travels inside a checkpoint: configuration, SSE layer, cache and hybrid model; and its registration."""
