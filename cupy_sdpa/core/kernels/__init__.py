"""Kinds of steps: the CUDA kernels of the package, each with its function for numpy arrays."""
