"""Programs: every call as a list of steps over named arrays, built from metadata, then run."""
