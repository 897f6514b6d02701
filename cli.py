"""The sse-convert command from a checkout: `python cli.py --help`."""

from sse_convert.cli.app import main

main()
