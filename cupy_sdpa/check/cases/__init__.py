"""Random problems as literals, and the values and memory layouts of their arrays."""
