"""Repeated calls: the key that identifies a call, calls that are not parsed again, and their CUDA graphs."""
