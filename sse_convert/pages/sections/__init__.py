"""The sections of a report, one file each: a function from a run to a `Section`."""
