from sse_convert.cli import main

main()
