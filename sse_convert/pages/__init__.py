"""Pages about runs: what `report` and `compare` show, as HTML that opens from disk."""
