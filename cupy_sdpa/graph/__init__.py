"""Attention as a graph of operations, as plain data, and the interpreter that evaluates it on numpy arrays."""
