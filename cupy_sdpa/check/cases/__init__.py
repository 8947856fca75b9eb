"""Random problems as plain literals, and the data and memory of their arrays."""
