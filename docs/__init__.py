"""The documentation site: its pages, what generates the reference, and what runs the commands that the pages show."""
