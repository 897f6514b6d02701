"""The command line: commands, exit codes, JSON."""
