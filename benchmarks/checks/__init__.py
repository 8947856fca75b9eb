"""Checks on the GPU: accuracy of all pairs of options, memory accesses, and cuDNN's shape override."""
