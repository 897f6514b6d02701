"""Softmax attention in a window with sinks, alone or beside SSE."""
