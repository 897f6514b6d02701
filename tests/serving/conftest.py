"""Tests of a real engine run in its own environment: `make test-serving`."""

collect_ignore = ["vllm"]
