"""`python -m sse_convert` is the `sse-convert` command."""

from sse_convert.cli.app import main

main()
