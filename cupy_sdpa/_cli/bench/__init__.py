"""``bench``: time the problems of a trace."""
